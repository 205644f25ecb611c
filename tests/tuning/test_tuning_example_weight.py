"""`ExampleWeight(scorer)`: a network computes the weight of an example."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from tuning_examples import classes, network

import bilevel as bl
from bilevel.tuning import ExampleWeight, ExampleWeights, prepare


class Rater(nn.Module):
    """A logit for every label, from the features. The label of the example selects one."""

    def __init__(self, features=3, labels=3):
        super().__init__()
        self.table = nn.Linear(features, labels)

    def forward(self, x, y):
        return self.table(x).gather(1, y[:, None])[:, 0]


def test_the_gradient_of_a_loss_weight_is_that_of_a_constant_weight():
    """∇ of the learned loss is Σ v(ℓᵢ)∇ℓᵢ, with v from the scorer at the current losses."""
    scorer = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1))
    x, y = classes(40)
    job = prepare(network(), F.cross_entropy, ExampleWeight(scorer, of="loss"), (x, y), classes(20, seed=1), steps=2)
    w = {name: leaf.clone().requires_grad_() for name, leaf in job.network.w.items()}
    loss = job.problem.inner(w, job.space.lam, job.task.batch(1) if callable(job.task.train) else job.task.train)
    found = torch.autograd.grad(loss, list(w.values()))
    losses = F.cross_entropy(job.network.train(w, x), y, reduction="none")
    weights = torch.sigmoid(scorer(losses.detach()[:, None]))[:, 0].detach()
    expected = torch.autograd.grad((weights * losses).mean(), list(w.values()))
    assert bl.testing.relative_error(list(found), list(expected)) < 1e-6


def test_new_rows_have_weights_and_the_scorer_is_left_alone():
    torch.manual_seed(0)
    x, y = classes(60)
    scorer = Rater()
    before = {name: leaf.clone() for name, leaf in scorer.state_dict().items()}
    run = {"lr": 0.3, "steps": 10, "iterations": 3}
    found = bl.tune(network(), F.cross_entropy, ExampleWeight(scorer), (x, y), classes(30, seed=1), **run)
    assert all(torch.equal(before[name], leaf) for name, leaf in scorer.state_dict().items())
    new_x, new_y = classes(7, seed=5)
    weights = found.weights(new_x, new_y)
    assert weights.shape == (7,) and bool(((weights > 0) & (weights < 1)).all())
    tuned = Rater()
    tuned.load_state_dict({name: torch.as_tensor(leaf) for name, leaf in found.values["example_weight"].items()})
    assert torch.allclose(weights, torch.sigmoid(tuned(new_x, new_y)).detach())


def test_wrong_labels_of_a_table_get_small_weights():
    """A third of the labels of a table are wrong; the scorer also finds wrong labels among rows that it never saw."""
    from sklearn.datasets import load_breast_cancer

    x, y = (torch.as_tensor(part) for part in load_breast_cancer(return_X_y=True))
    x = ((x - x.mean(0)) / x.std(0)).double()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    wrong = torch.rand(len(y), generator=torch.Generator().manual_seed(1)) < 1 / 3
    noisy = torch.where(wrong, 1 - y, y)
    torch.manual_seed(0)
    run = {"lr": 0.5, "steps": 30, "iterations": 25, "outer_lr": 0.5}
    role, val = ExampleWeight(Rater(30, 2)), (x[250:350], y[250:350])
    found = bl.tune(nn.Linear(30, 2), F.cross_entropy, role, (x[:250], noisy[:250]), val, **run)
    assert found.value < found.start_value
    weights = found.weights(x[350:], noisy[350:])
    assert float(weights[~wrong[350:]].mean()) > float(weights[wrong[350:]].mean()) + 0.2


class Named(nn.Linear):
    def forward(self, inputs):
        return "a name"


def test_refusals():
    x, y = classes(30)
    with pytest.raises(bl.BilevelError, match="no parameters to tune"):
        ExampleWeight(nn.ReLU())
    with pytest.raises(bl.BilevelError, match="'inputs', 'targets', 'loss'"):
        ExampleWeight(nn.Linear(1, 1), of="labels")
    with pytest.raises(bl.BilevelError, match=r'Linear\.forward does not take them.*of="inputs"'):
        ExampleWeight(nn.Linear(3, 1))
    wide = ExampleWeight(nn.Linear(3, 2), of="inputs")
    with pytest.raises(bl.BilevelError, match="one number per example"):
        bl.tune(network(), F.cross_entropy, wide, (x, y), classes(20, seed=1), lr=0.1, steps=2, iterations=1)
    text = ExampleWeight(Named(3, 1), of="inputs")
    with pytest.raises(bl.BilevelError, match="returned str for 30 examples"):
        bl.tune(network(), F.cross_entropy, text, (x, y), classes(20, seed=1), lr=0.1, steps=2, iterations=1)
    run = {"lr": 0.1, "steps": 2, "iterations": 1}
    found = bl.tune(network(), F.cross_entropy, ExampleWeights(), (x, y), classes(20, seed=1), **run)
    with pytest.raises(bl.BilevelError, match="ExampleWeight"):
        found.weights(x, y)
