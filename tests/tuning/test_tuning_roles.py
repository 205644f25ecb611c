"""Every role's hypergradient against central differences, and against what torch does with the same setting."""

import functools
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from tuning_examples import classes, loader, network

import bilevel as bl
from bilevel import trees
from bilevel.testing import check_problem
from bilevel.tuning import (
    Augmentation,
    ExampleWeight,
    ExampleWeights,
    Hyperparameter,
    Initialisation,
    LabelSmoothing,
    LearningRate,
    LossWeights,
    Momentum,
    WeightDecay,
    prepare,
    roles,
)

VAL = classes(30, seed=1)


def tempered(output, target, hp):
    return F.cross_entropy(output / hp["temperature"], target)


def scaled(x, strength, generator):
    return x * (1 + strength[0] * torch.rand(x.shape, generator=generator)) + strength[1]


class Rater(nn.Module):
    """The logit of an example's weight, from its features and its label."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))

    def forward(self, x, y):
        return self.net(x).gather(1, y[:, None])[:, 0]


# Each case: the declarations, and other arguments of `prepare`.
CASES = {
    "decay of the model": ([WeightDecay(0.05)], {}),
    "decay per layer": ([WeightDecay(0.05, per="layer")], {}),
    "decay per weight": ([WeightDecay(0.05, per="weight")], {}),
    "decay of weights only": ([WeightDecay(0.05, per="layer", only=lambda name: name.endswith("weight"))], {}),
    "learning rate": ([LearningRate(0.3)], {}),
    "learning rate per step": ([LearningRate(0.3, per="step")], {"momentum": 0.5}),
    "learning rate per layer": ([LearningRate(0.3, per="layer")], {"dynamics": "adam"}),
    "momentum": ([Momentum(0.5)], {"lr": 0.3}),
    "momentum per step": ([Momentum(0.5, per="step"), LearningRate(0.2)], {}),
    "first beta of Adam": ([Momentum(0.7), LearningRate(0.05)], {"dynamics": "adam"}),
    "Nesterov": ([Momentum(0.7)], {"dynamics": bl.Nesterov(0.2)}),
    "torch's own": ([LearningRate(0.1)], {"dynamics": bl.TorchOptim(torch.optim.SGD, lr=1.0, momentum=0.5)}),
    "loss weights": (
        [LossWeights()],
        {"loss": {"log": F.cross_entropy, "square": lambda o, y: ((o - F.one_hot(y, 3)) ** 2).mean()},
         "val_loss": F.cross_entropy},
    ),
    "label smoothing": ([LabelSmoothing(0.1)], {}),
    "noise": ([Augmentation(0.3)], {}),
    "own augmentation": ([Augmentation([0.3, 0.2], function=scaled)], {}),
    "example weights": ([ExampleWeights()], {}),
    "a weight of inputs and targets": ([ExampleWeight(Rater())], {}),
    "a weight of the loss": ([ExampleWeight(nn.Linear(1, 1), of="loss")], {}),
    "example weights and smoothing": ([ExampleWeights(0.7), LabelSmoothing(0.2)], {}),
    "scale of the start": ([Initialisation(per="layer")], {}),
    "scale of the whole start": ([Initialisation(0.5, per="model")], {}),
    "the start itself": ([Initialisation(per="weight")], {}),
    "temperature": (
        [Hyperparameter("temperature", 2.0, range=(0.1, 10), transform="softplus")],
        {"loss": tempered, "val_loss": F.cross_entropy},
    ),
    "own dynamics": (
        [Hyperparameter("rate", 0.1, range=(0, 1))],
        {"dynamics": lambda hp: bl.Adam(lr=hp["rate"])},
    ),
    "everything": (
        [LearningRate(0.2, per="step"), Momentum(0.3), WeightDecay(0.01, per="layer"), ExampleWeights(),
         LabelSmoothing(), Augmentation(), Initialisation()],
        {},
    ),
}  # fmt: skip


def prepared(case, train=None, model=None, steps=5):
    declared, extra = CASES[case]
    if "dynamics" not in extra and not any(isinstance(one, LearningRate) for one in declared):
        extra = {"lr": 0.3, **extra}
    extra = dict(extra)
    loss = extra.pop("loss", F.cross_entropy)
    return prepare(model or network(), loss, declared, train or loader(), VAL, steps=steps, **extra)


def test_every_role_has_a_case():
    tried = {type(one) for declared, _ in CASES.values() for one in declared}
    assert tried == set(roles.find().values())


@pytest.mark.parametrize("case", CASES)
def test_hypergradients_agree_with_central_differences(case):
    job = prepared(case)
    # Not at the start, because equal entries could hide a wrong order of entries.
    generator = torch.Generator().manual_seed(0)
    lam = trees.map(lambda x: x + 0.1 * torch.rand(x.shape, generator=generator), job.space.lam)
    report = check_problem(job.problem, lam, job.task, dynamics=job.dynamics, steps=job.steps)
    assert report.differences < 1e-6 and report.methods < 1e-10


def test_dropout_and_batch_norm_are_pure_and_differentiable():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3))
    for train in (loader(), classes()):
        job = prepared("decay per layer", train=train, model=model)
        assert job.random
        report = check_problem(job.problem, job.space.lam, job.task, dynamics=job.dynamics, steps=job.steps)
        assert report.differences < 1e-6
    masks = [job.problem.inner(job.network.w, job.space.lam, job.task.batch(t)).item() for t in (1, 2, 1)]
    assert masks[0] == masks[2] != masks[1]


@pytest.mark.parametrize("method", [bl.Reverse(), bl.Reverse("sqrt"), bl.Forward(), bl.Unrolled()])
def test_all_exact_methods_agree_on_everything_at_once(method):
    job = prepared("everything")
    lam, settings = job.space.lam, {"dynamics": job.dynamics, "steps": job.steps}
    expected = bl.hypergradient(job.problem, lam, job.task, method=bl.Unrolled(), **settings)
    found = bl.hypergradient(job.problem, lam, job.task, method=method, **settings)
    assert bl.testing.relative_error(found.grad, expected.grad) < 1e-10


WEIGHT = torch.tensor([1.0, 5.0, 0.2])


@pytest.mark.parametrize(
    "loss",
    [
        F.cross_entropy,
        nn.CrossEntropyLoss(reduction="sum"),
        functools.partial(F.cross_entropy, reduction="sum"),
        nn.CrossEntropyLoss(weight=WEIGHT),
        nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=1, label_smoothing=0.3),
        functools.partial(F.cross_entropy, weight=WEIGHT),
        nn.CrossEntropyLoss(ignore_index=2),
        nn.MultiMarginLoss(),
        lambda output, target, reduction="sum": F.cross_entropy(output, target, reduction=reduction),
    ],
)
def test_with_weights_of_one_the_loss_is_the_one_that_was_passed(loss):
    """For every reduction, with class weights and with an ignored label."""
    one = ExampleWeights(1.0, range=(0.0, 2.0), transform=None)
    job = prepare(network(), loss, one, classes(), VAL, steps=1)
    batch = job.task.batch(1)
    expected = loss(job.network.train(job.network.w, batch.inputs), batch.targets)
    torch.testing.assert_close(job.problem.inner(job.network.w, job.space.lam, batch), expected)


def test_a_weighted_mean_that_is_not_known_is_refused():
    def loss(output, target, reduction="mean"):
        return F.cross_entropy(output, target, WEIGHT, reduction=reduction)

    with pytest.raises(bl.BilevelError, match="with reduction='none' its mean is"):
        prepare(network(), loss, ExampleWeights(), classes(), VAL, steps=1)


@pytest.mark.parametrize("others", [[], [ExampleWeights(1.0, range=(0.0, 2.0), transform=None)]])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_smoothing_with_class_weights_is_torchs_too(reduction, others):
    loss = nn.CrossEntropyLoss(weight=WEIGHT, reduction=reduction)
    job = prepare(network(), loss, [LabelSmoothing(0.2), *others], classes(), VAL, steps=1)
    batch = job.task.batch(1)
    output = job.network.train(job.network.w, batch.inputs)
    expected = F.cross_entropy(output, batch.targets, WEIGHT, label_smoothing=0.2, reduction=reduction)
    torch.testing.assert_close(job.problem.inner(job.network.w, job.space.lam, batch), expected)


def test_smoothed_labels_give_torchs_label_smoothing():
    job = prepared("label smoothing")
    batch = job.task.batch(1)
    output = job.network.train(job.network.w, batch.inputs)
    expected = F.cross_entropy(output, batch.targets, label_smoothing=0.1)
    torch.testing.assert_close(job.problem.inner(job.network.w, job.space.lam, batch), expected)


def test_weights_of_examples_belong_to_the_examples_in_the_batch():
    weights = torch.linspace(0.1, 0.9, 24)
    job = prepare(network(), nn.CrossEntropyLoss(), ExampleWeights(weights), loader(), VAL, steps=3)
    batch = job.task.batch(2)
    one_by_one = F.cross_entropy(job.network.train(job.network.w, batch.inputs), batch.targets, reduction="none")
    found = job.problem.inner(job.network.w, job.space.lam, batch)
    torch.testing.assert_close(found, (weights[batch.index] * one_by_one).mean())
    gradient = bl.hypergradient(job.problem, job.space.lam, job.task, dynamics=job.dynamics, steps=1).grad
    seen = job.task.batch(1).index
    unseen = torch.ones(24, dtype=torch.bool)
    unseen[seen] = False
    assert bool((gradient["example_weights"][unseen] == 0).all())
    assert bool((gradient["example_weights"][seen] != 0).all())


def test_a_decay_per_weight_of_one_value_is_the_decay_of_the_model():
    jobs = [prepared(case) for case in ("decay of the model", "decay per layer", "decay per weight")]
    gradients = [
        bl.hypergradient(job.problem, job.space.lam, job.task, dynamics=job.dynamics, steps=5).grad["weight_decay"]
        for job in jobs
    ]
    totals = [float(sum(leaf.sum() for leaf in trees.leaves(g))) for g in gradients]
    assert totals[0] == pytest.approx(totals[1], rel=1e-10) == pytest.approx(totals[2], rel=1e-10)


@dataclass(frozen=True)
class Lasso(Hyperparameter):
    """A role that a user wrote: a smooth L1 penalty per layer."""

    def begin(self, setup):
        return self.spread(self.start, (len(setup.layers()),), setup)

    def penalty(self, value, w, setup):
        layers = zip(value, setup.layers().values(), strict=True)
        return sum(strength * (w[name] ** 2 + 1e-4).sqrt().sum() for strength, names in layers for name in names)


def test_a_role_of_ones_own():
    lasso = Lasso("lasso", 1e-2, range=(1e-6, 1), transform="log")
    job = prepare(network(), F.cross_entropy, lasso, loader(), VAL, steps=5)
    report = check_problem(job.problem, job.space.lam, job.task, dynamics=job.dynamics, steps=5)
    assert report.differences < 1e-6
    assert bl.tune(network(), F.cross_entropy, lasso, loader(), VAL, steps=5, iterations=2).values["lasso"].shape == (
        2,
    )


def test_a_step_function_as_dynamics():
    def step(loss, w, state, t):
        return trees.map(lambda x, g: x - 0.3 / t * g, w, bl.gradient(loss, w)), state

    job = prepare(network(), F.cross_entropy, WeightDecay(0.1), loader(), VAL, steps=4, dynamics=step)
    same = prepare(
        network(), F.cross_entropy, WeightDecay(0.1), loader(), VAL, steps=4,
        dynamics=bl.GradientDescent(lambda t: 0.3 / t),
    )  # fmt: skip
    assert job.run(job.space.lam)[1] == pytest.approx(same.run(same.space.lam)[1], rel=1e-12)
