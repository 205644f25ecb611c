"""Leaving rows out of the tuning: derivatives of scores and differences, the formula and a new tuning agree."""

import math

import numpy as np
import pytest
import torch

from bilevel.engine.process import Process
from bilevel.estimators import BilevelElasticNet, BilevelLogisticRegression, BilevelRidge
from bilevel.estimators.folds import single_fold, split
from bilevel.estimators.hyperparameters import grouping
from bilevel.estimators.optimism import HeldOutRows, _leverages, corrected_losses
from bilevel.estimators.rows_left_out import RowsLeftOut
from bilevel.estimators.rows_of_table import RowsOfTable
from bilevel.estimators.search import EXACT, PenaltySearch
from bilevel.estimators.sums_of_table import SumsOfTable
from bilevel.structures import LogLoss, SquaredError

KINDS = ["sums", "net", "kernel", "left out", "left out, wide", "binary", "classes", "classes, wide"]


def table_of(kind):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(24, 30 if "wide" in kind or kind == "kernel" else 5))
    codes = np.arange(24) // 3 % 3
    y = X[:, :2] + rng.normal(size=(24, 2))
    weight = rng.uniform(0.5, 2, 24)
    pairs = [(np.arange(24) % 3 != k, np.arange(24) % 3 == k) for k in range(3)]
    folds = split(pairs, X, y[:, 0], weight, classes=False, random_state=0)
    groups = grouping(np.arange(X.shape[1]) % 4, X.shape[1])
    arguments = X, y, folds, groups, True
    if kind.startswith("left out"):
        folds = single_fold(weight)
        return RowsLeftOut(X, y, folds, groups, True), folds
    if kind in ("sums", "net"):
        return SumsOfTable(*arguments, 0.5 if kind == "net" else None), folds
    if kind == "kernel":
        return RowsOfTable(*arguments, SquaredError()), folds
    indicators = (codes > 0).astype(float)[:, None] if kind == "binary" else np.eye(3)[codes]
    return RowsOfTable(X, indicators, folds, groups, True, LogLoss()), folds


def held_out(table, folds, lam):
    search = PenaltySearch(table, folds, 4, (-9.0, 9.0), 20, 1e-6)
    process = Process(table.problem, lam, search.task, search.settings["dynamics"], 0, search.evaluate(lam).inner)
    with torch.no_grad():
        return table.held_out(table.method(EXACT).minimum(process), search.folds, lam), search


@pytest.mark.parametrize("kind", KINDS)
def test_slopes_of_held_out_scores_are_their_differences(kind):
    table, folds = table_of(kind)
    lam = torch.tensor([0.3, -0.5, 0.8, 0.1], dtype=torch.float64) - (2.5 if kind == "net" else 0)
    found, search = held_out(table, folds, lam)
    losses = table.loss.values(found.scores.mT[None], found.y.mT)[0]
    assert float(found.weight @ losses / found.weight.sum()) == pytest.approx(
        float(search.evaluate(lam).value), rel=1e-6
    )
    step = 1e-5 * torch.eye(4, dtype=torch.float64)
    for j in range(4):
        there, before = (held_out(table, folds, lam + sign * step[j])[0].scores for sign in (1, -1))
        torch.testing.assert_close(found.slopes[..., j], (there - before) / 2e-5, rtol=1e-4, atol=1e-6)


def test_both_forms_of_leverages_agree():
    torch.manual_seed(0)
    slopes, tether = torch.randn(6, 2, 12).double(), torch.rand(12).double() + 0.1
    factor = torch.randn(6, 2, 2).double()
    curvature = factor @ factor.mT
    by_rows = _leverages(slopes, curvature, tether, mean=True)
    # The same items twice with half the curvature, so that there are more items than entries of λ.
    twice = _leverages(slopes.repeat(2, 1, 1), curvature.repeat(2, 1, 1) / 2, tether, mean=True)
    torch.testing.assert_close(by_rows, twice[:6], rtol=1e-4, atol=1e-6)


def test_where_scores_are_linear_in_lambda_it_is_tuning_again_without_the_row():
    rng = np.random.default_rng(0)
    slopes, y, tether = rng.normal(size=(20, 3)), rng.normal(size=20), np.array([0.3, 1.0, 2.0])

    def tuned(rows):
        J = slopes[rows]
        return np.linalg.solve(J.T @ J + np.diag(tether), J.T @ y[rows])

    scores = slopes @ tuned(np.arange(20))
    held = HeldOutRows(
        *(torch.from_numpy(part) for part in (scores[:, None], slopes[:, None], y[:, None], np.ones(20)))
    )
    found, count = corrected_losses(held, SquaredError(), torch.from_numpy(tether), mean=False)
    again = [slopes[i] @ tuned(np.delete(np.arange(20), i)) for i in range(20)]
    np.testing.assert_allclose(found, 0.5 * (y - again) ** 2, rtol=1e-6)
    smoother = slopes @ np.linalg.solve(slopes.T @ slopes + np.diag(tether), slopes.T)
    assert count == pytest.approx(np.trace(smoother), rel=1e-6)


@pytest.mark.parametrize("estimator", [BilevelRidge, BilevelElasticNet, BilevelLogisticRegression])
def test_penalties_are_free_where_features_differ_and_equal_where_none_matters(estimator):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(80, 30))
    signal, noise = X[:, :3] @ [2.0, -1.5, 1.0], rng.normal(size=80)
    goal = (lambda y: (y > 0).astype(int)) if estimator is BilevelLogisticRegression else (lambda y: y)
    assert estimator().fit(X, goal(signal + noise)).tether_ < math.inf
    assert estimator().fit(X, goal(noise)).tether_ >= 3


def test_the_tether_of_a_ridge_does_not_depend_on_chance_or_order():
    rng = np.random.default_rng(1)
    X = rng.normal(size=(60, 12))
    y = X[:, 0] + 0.5 * X[:, 1] + rng.normal(size=60)
    first = BilevelRidge(random_state=0).fit(X, y)
    for order, seed in ((np.arange(60), 3), (np.argsort(y), 0), (rng.permutation(60), 1)):
        other = BilevelRidge(random_state=seed).fit(X[order], y[order])
        assert other.tether_ == first.tether_
        np.testing.assert_allclose(other.alpha_, first.alpha_, rtol=1e-3)


@pytest.mark.parametrize("kind", ["left out", "left out, wide"])
def test_the_values_of_many_shared_penalties_at_once_are_those_of_the_engine(kind):
    table, folds = table_of(kind)
    search = PenaltySearch(table, folds, 1, (-9.0, 9.0), 20, 1e-6)
    levels = torch.linspace(-6, 8, 8, dtype=torch.float64)
    found = table.shared_values(levels, search.task)
    np.testing.assert_allclose(found, [float(search.evaluate(level[None]).value) for level in levels], rtol=1e-7)
