"""A random search in the time of a tuning."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import mse_loss

import bilevel as bl
from bilevel.tuning import Initialisation, LearningRate, LossWeights, WeightDecay
from bilevel.tuning.random_search import _drawn, random_search
from bilevel.tuning.training_problem import prepare


def problem(hyperparameters, loss=mse_loss, **settings):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1, dtype=torch.float64)
    X, true = torch.randn(40, 3, dtype=torch.float64), torch.tensor([[1.0], [0.0], [-1.0]], dtype=torch.float64)
    y = X @ true
    return model, loss, hyperparameters, (X[:20], y[:20]), (X[20:], y[20:])


@pytest.mark.filterwarnings("ignore:On 8 held-out examples")  # which of them does better is not what is tested
def test_the_result_is_the_loss_of_its_values_and_says_how_many_trainings():
    rates = [LearningRate(0.01, per="step"), WeightDecay(1e-3)]
    args = problem(rates)
    found = bl.tune(*args, steps=5, iterations=3, holdout=0.4)
    search = found.search
    assert found.search is search and search.trials >= 1
    assert search.value <= found.start_value * (1 + 1e-12) and search.tuned == found.value
    assert np.ptp(search.values["lr"]) == 0
    model, loss, _, train, val = args
    same = [LearningRate(float(search.values["lr"][0]), per="step"), WeightDecay(search.values["weight_decay"])]
    again = bl.tune(model, loss, same, train, val, steps=5, iterations=0, holdout=0.4)
    assert again.value == pytest.approx(search.value, rel=1e-9)
    assert again.held_out.tuned == pytest.approx(search.held_out, rel=1e-9)
    assert f"random search of {search.trials} training" in str(search) and "held-out" in str(search)


def test_trainings_that_diverge_count_and_are_not_the_best(monkeypatch):
    ticks = itertools.count()  # a training takes a second
    monkeypatch.setattr("bilevel.tuning.random_search.time.perf_counter", lambda: float(next(ticks)))
    job = prepare(*problem(LearningRate(0.01, range=(1e-3, 1e6))), steps=60)
    trials, _, best, lam = random_search(job, 12.0)
    assert trials > 5 and math.isfinite(best)
    assert best == pytest.approx(job.run(lam)[1], rel=1e-12)


def test_a_draw_stays_in_the_ranges_and_leaves_starting_weights_alone():
    losses = {"one": mse_loss, "two": lambda output, target: (output - target).abs().mean()}
    declared = [LearningRate(0.1, range=(0.05, 0.2)), LossWeights(), Initialisation(per="weight")]
    job = prepare(*problem(declared, losses), steps=2, val_loss=mse_loss)
    draw = torch.Generator().manual_seed(0)
    drawn = [_drawn(job.space, draw) for _ in range(20)]
    rates = [job.space.plain(lam)["lr"] for lam in drawn]
    assert 0.05 <= min(rates) < 0.08 and 0.15 < max(rates) <= 0.2
    mixes = [list(job.space.plain(lam)["loss_weights"].values()) for lam in drawn]
    assert np.allclose(np.sum(mixes, axis=1), 1) and np.ptp(np.array(mixes)[:, 0]) > 0.3
    start = job.space.lam["initialisation"]
    assert all(lam["initialisation"] is start for lam in drawn)
