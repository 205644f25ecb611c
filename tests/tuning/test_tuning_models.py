"""`tune` with models and data of many kinds."""

import numpy as np
import pandas
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset
from tuning_examples import classes, loader, network

import bilevel as bl
from bilevel.testing import check_problem
from bilevel.tuning import (
    LearningRate,
    Momentum,
    WeightDecay,
    prepare,
)

VAL = classes(30, seed=1)


class Attentive(nn.Module):
    """Classifies sequences of words with attention."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(6, 4)
        self.block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.block(self.words(x)).mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(6, 4)
        self.cell = nn.LSTM(4, 3, batch_first=True)
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.cell(self.words(x))[0][:, -1])


@pytest.mark.parametrize("kind", [Attentive, Recurrent])
def test_attention_and_recurrence_are_differentiated_through_training(kind):
    """Fused attention kernels have no second derivative, which the hypergradient needs."""
    torch.manual_seed(0)
    x = torch.randint(6, (12, 5))
    train, val = (x, x[:, 0] // 3), (x.roll(1, 1), x[:, 1] // 3)
    job = prepare(kind(), F.cross_entropy, [WeightDecay(0.01), LearningRate(0.2)], train, val, steps=3)
    report = check_problem(job.problem, job.space.lam, job.task, dynamics=job.dynamics, steps=job.steps)
    assert report.differences < 1e-6


class Noisy(nn.Module):
    """Draws random numbers in evaluation too, as a variational autoencoder does."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(self.norm(x + 0.5 * torch.randn_like(x)))


def test_a_model_that_draws_in_evaluation_has_one_validation_loss():
    torch.manual_seed(0)
    model, before = Noisy(), torch.get_rng_state()
    one, two = (bl.tune(model, F.cross_entropy, LearningRate(0.3), loader(), VAL, steps=4, iterations=3) for _ in "12")
    assert torch.equal(torch.get_rng_state(), before), "the global generator is left as it was"
    assert one.history["value"].tolist() == two.history["value"].tolist()
    job = prepare(model, F.cross_entropy, LearningRate(0.3), loader(), VAL, steps=4)
    assert job.run(one.lam)[1] == one.value
    report = check_problem(job.problem, job.space.lam, job.task, dynamics=job.dynamics, steps=job.steps)
    assert report.differences < 1e-6


def test_a_loss_made_of_several_quadratics_has_no_closed_form():
    """With a squared hinge loss the iterates cross kinks, so the closed form does not apply."""
    torch.manual_seed(2)
    x, labels = torch.randn(20, 3), torch.randn(20).sign()
    model, declared = nn.Linear(3, 1), [WeightDecay(0.02), Momentum(0.9), LearningRate(0.3)]

    def squared_hinge(outputs, targets):
        return torch.relu(1 - targets * outputs[:, 0]).square().mean()

    arguments = (model, squared_hinge, declared, (x, labels), (x + 0.3, labels))
    found = bl.tune(*arguments, steps=25, iterations=1)
    assert "Spectral" not in found.method
    assert found.method != bl.tune(*arguments[:1], F.mse_loss, declared, (x, x[:, :1]), (x, x[:, 1:2]), steps=25).method


@pytest.mark.parametrize("kind", [np.asarray, lambda x: np.asarray(x)[::-1][::-1], pandas.DataFrame])
def test_arrays_and_tables_are_tuned_like_tensors(kind):
    expected = bl.tune(network(), F.cross_entropy, LearningRate(0.2), classes(), VAL, steps=5, iterations=2)
    train, val = ((kind(x), pandas.Series(y)) for x, y in (classes(), VAL))
    kept = train[0].copy()
    found = bl.tune(network(), F.cross_entropy, LearningRate(0.2), train, val, steps=5, iterations=2)
    assert found.history["value"].tolist() == expected.history["value"].tolist()
    assert np.array_equal(np.asarray(train[0]), np.asarray(kept))


def test_loaders_of_one_data_set_with_other_samplers_are_not_the_same_data():
    data = TensorDataset(*classes())
    halves = (DataLoader(data, batch_size=4, sampler=SubsetRandomSampler(range(*ends))) for ends in ((12,), (12, 24)))
    assert bl.tune(network(), F.cross_entropy, WeightDecay(), *halves, steps=3, iterations=1).value > 0
