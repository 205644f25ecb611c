"""The criteria's gradients: closed forms, the engine, central differences and scikit-learn agree."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import sparse
from sklearn.linear_model import ElasticNet, LogisticRegression, Ridge

import bilevel as bl
from bilevel.estimators.elastic_net_criterion import ProximalCriterion
from bilevel.estimators.folds import split
from bilevel.estimators.gram_criterion import GramCriterion
from bilevel.estimators.hyperparameters import grouping, tether
from bilevel.estimators.linear_problem import LinearProblem
from bilevel.estimators.losses import LogLoss, SquaredError
from bilevel.estimators.newton_criterion import NewtonCriterion
from bilevel.estimators.ridge_criterion import KernelEquations, NormalEquations

SHAPES = [(40, 8, 1), (40, 8, 2), (18, 25, 1)]


def table(rows, features, outputs, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, features)) + 1
    y = 2 * X[:, :outputs] + rng.normal(size=(rows, outputs)) + 3
    weight = rng.uniform(0.5, 2, rows)
    weight[3] = 0
    return X, y, weight, rng.normal(size=features)


def classes_of(X, outputs):
    codes = (X[:, 0] > 1).astype(int) + (outputs > 1) * (X[:, 1] > 1)
    return codes, np.eye(3)[codes] if outputs > 1 else np.eye(2)[codes][:, 1:]


def newton(X, y, folds, loss, intercept, dense):
    criterion = NewtonCriterion(LinearProblem(X, y, folds, loss, free=intercept))
    criterion.dense = dense
    return criterion


def gram(X, y, folds, loss, intercept):
    return GramCriterion(LinearProblem(X, y, folds, loss, free=intercept))


def criteria(kind, X, y, weight, intercept):
    """All ways to the same criterion, the fastest first."""
    tables = (X, sparse.csr_matrix(X))
    if kind == "logistic":
        codes, y = classes_of(X, y.shape[1])
        folds = split(3, X, codes, weight, classes=True, random_state=0)
        by_newton = [
            newton(table, y, folds, LogLoss(), intercept, dense) for table in tables for dense in (True, False)
        ]
        return [*by_newton, gram(X, y, folds, LogLoss(), intercept)]
    folds = split(3, X, y[:, 0], weight, classes=False, random_state=0)
    if kind == "ridge":
        return [
            *(NormalEquations.of(table, y, folds, intercept, shared=False) for table in tables),
            *(KernelEquations(table, y, folds, intercept) for table in tables),
            *(newton(table, y, folds, SquaredError(), intercept, dense) for table in tables for dense in (True, False)),
        ]
    return [ProximalCriterion(table, y, folds, intercept, 0.6) for table in tables]


@pytest.mark.parametrize("kind", ["ridge", "logistic", "elastic net"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("intercept", [True, False])
def test_every_way_to_a_criterion_agrees_with_the_others_and_with_differences(kind, shape, intercept):
    X, y, weight, log_alpha = table(*shape)
    log_alpha = 0.4 * log_alpha - (1 if kind == "elastic net" else 0)
    first, *others = criteria(kind, X, y, weight, intercept)
    found = first.evaluate(log_alpha)
    for other in others:
        again = other.evaluate(log_alpha)
        assert again.value == pytest.approx(found.value, rel=1e-9)
        np.testing.assert_allclose(again.gradient, found.gradient, rtol=1e-7, atol=1e-9)

    step = 1e-5
    differences = [
        (first.evaluate(log_alpha + step * e).value - first.evaluate(log_alpha - step * e).value) / (2 * step)
        for e in np.eye(len(log_alpha))
    ]
    np.testing.assert_allclose(found.gradient, differences, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", ["ridge", "logistic", "elastic net"])
def test_the_engine_finds_the_same_hypergradient_for_the_problem_of_the_certificate(kind):
    X, y, weight, log_alpha = table(40, 8, 1)
    log_alpha = 0.4 * log_alpha - (1 if kind == "elastic net" else 0)
    criterion = criteria(kind, X, y, weight, True)[0]
    found = criterion.evaluate(log_alpha)
    problem, lam, task, w, told = criterion.bilevel_problem(log_alpha)
    proximal = "dynamics" in told
    method = bl.Implicit(bl.FixedPoint(tol=1e-13, max_iter=100_000)) if proximal else bl.Implicit(bl.Direct())
    engine = bl.hypergradient(
        problem,
        lam,
        task,
        dynamics=told["dynamics"] if proximal else lambda loss, w, state, t: (w, state),
        steps=1,
        start=w,
        method=method,
    )
    assert float(engine.value) == pytest.approx(found.value, rel=1e-10)
    np.testing.assert_allclose(engine.grad.numpy(), found.gradient, rtol=1e-8, atol=1e-11)


def test_one_eigendecomposition_serves_every_shared_penalty():
    X, y, weight, _ = table(40, 8, 2)
    folds = split(3, X, y[:, 0], weight, classes=False, random_state=0)
    once = NormalEquations.of(X, y, folds, True, shared=True)
    each = NormalEquations.of(X, y, folds, True, shared=False)
    for level in (-12.0, 0.0, 5.0):
        a, b = (criterion.evaluate(np.full(8, level)) for criterion in (once, each))
        assert a.value == pytest.approx(b.value, rel=1e-10)
        np.testing.assert_allclose(a.gradient, b.gradient, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("sparsely", [False, True])
def test_refitting_is_scikit_learns_fit_at_equal_penalties(intercept, sparsely):
    X, y, weight, _ = table(40, 8, 2)
    codes, indicators = classes_of(X, 2)
    given = sparse.csr_matrix(X) if sparsely else X
    level = np.full(8, np.log(0.7))
    folds = split(3, X, y[:, 0], weight, classes=False, random_state=0)
    settings = {"fit_intercept": intercept, "tol": 1e-12}
    for criterion, rival in [
        (NormalEquations.of(given, y, folds, intercept, False), Ridge(0.7, **settings)),
        (KernelEquations(given, y, folds, intercept), Ridge(0.7, **settings)),
        (
            ProximalCriterion(given, y, folds, intercept, 0.6),
            ElasticNet(0.7, l1_ratio=0.6, max_iter=100_000, **settings),
        ),
    ]:
        coef, b = criterion.refit(level)
        rival.fit(X, y, sample_weight=weight)
        np.testing.assert_allclose(coef.T, rival.coef_, atol=1e-8)
        np.testing.assert_allclose(b, rival.intercept_, atol=1e-8)

    stratified = split(3, X, codes, weight, classes=True, random_state=0)
    rival = LogisticRegression(C=1 / 0.7, max_iter=10_000, **settings).fit(X, codes, sample_weight=weight)
    for dense in (True, False):
        coef, b = newton(given, indicators, stratified, LogLoss(), intercept, dense).refit(level)
        np.testing.assert_allclose(coef.T, rival.coef_, atol=1e-5)
        np.testing.assert_allclose(b - b.mean(), rival.intercept_ - np.mean(rival.intercept_), atol=1e-5)


def logistic(rows=300, features=20, seed=0, folds=3):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, features)) @ (np.eye(features) + 0.5 * rng.normal(size=(features, features)))
    y = (X[:, :1] + X[:, 1:2] + rng.normal(size=(rows, 1)) > 0).astype(float)
    dealt = split(folds, X, y[:, 0], rng.uniform(0.5, 2, rows), classes=True, random_state=0)
    return X, y, dealt, rng


@pytest.mark.parametrize("accuracy", [1e-2, 1e-3, 1e-6])
def test_stale_hessians_give_hypergradients_as_accurate_as_asked_along_a_path(accuracy):
    X, y, folds, rng = logistic()
    fast = gram(X, y, folds, LogLoss(), True)
    log_alpha = np.full(20, 2.0)
    for _ in range(8):
        log_alpha = log_alpha + 0.7 * rng.normal(size=20)
        exact = newton(X, y, folds, LogLoss(), True, dense=True).evaluate(log_alpha)
        found = fast.evaluate(log_alpha, accuracy)
        assert np.linalg.norm(found.gradient - exact.gradient) <= accuracy * np.linalg.norm(exact.gradient)
        assert found.value == pytest.approx(exact.value, rel=accuracy**1.5)


def test_stale_hessians_are_kept_and_shared_with_fewer_folds(monkeypatch):
    X, y, folds, rng = logistic(600)
    taken = []
    take = GramCriterion._cell_hessians
    monkeypatch.setattr(GramCriterion, "_cell_hessians", lambda self, s: taken.append(1) or take(self, s))
    criterion = gram(X, y, folds, LogLoss(), True)
    log_alpha = np.full(20, 3.0)
    criterion.evaluate(log_alpha, 1e-2)
    before, criterion.wasted = len(taken), -100  # never out of date
    for _ in range(5):
        log_alpha = log_alpha + 0.05 * rng.normal(size=20)
        criterion.evaluate(log_alpha, 1e-2)
    assert len(taken) == before
    rest = criterion.restricted(folds.without(0))
    rest.wasted = -100
    exact = newton(X, y, folds, LogLoss(), True, dense=True).restricted(folds.without(0)).evaluate(log_alpha)
    np.testing.assert_allclose(rest.evaluate(log_alpha, 1e-3).gradient, exact.gradient, rtol=2e-2, atol=1e-6)
    assert len(taken) == before


def test_sweeps_that_do_not_converge_are_left_for_newtons_method():
    """Hessians that belong to other data altogether cost time and nothing else."""
    X, y, folds, _ = logistic()
    log_alpha = np.full(20, 1.0)
    exact = newton(X, y, folds, LogLoss(), True, dense=True).evaluate(log_alpha)
    fast = gram(X, y, folds, LogLoss(), True)
    fast.evaluate(log_alpha)
    fast.grams.matrices[:] = 0.05 * np.eye(21)
    fast.w, fast.q, fast.scores, fast.slopes = np.zeros_like(fast.w), np.zeros_like(fast.q), np.zeros(0), None
    found = fast.evaluate(log_alpha)
    assert found.value == pytest.approx(exact.value, rel=1e-9)
    np.testing.assert_allclose(found.gradient, exact.gradient, rtol=1e-6, atol=1e-10)


def test_the_curvature_told_to_the_certificate_is_a_lower_bound():
    X, y, folds, _ = logistic()
    log_alpha = np.full(20, 1.0)
    fast, exact = gram(X, y, folds, LogLoss(), True), newton(X, y, folds, LogLoss(), True, dense=True)
    told, true = fast.bilevel_problem(log_alpha)[4]["mu"], exact.bilevel_problem(log_alpha)[4]["mu"]
    assert 0.02 * true < told <= true * (1 + 1e-9)


def test_folds_that_train_on_the_same_rows_are_solved_once():
    X, y, _, _ = logistic()
    weight, log_alpha = np.ones(300), np.full(20, 1.0)
    whole, halves = (
        split(0.3, X, y[:, 0], weight, classes=True, random_state=0, halve_holdout=halve) for halve in (False, True)
    )
    a, b = (newton(X, y, folds, LogLoss(), True, dense=True) for folds in (whole, halves))
    assert b.folds.count == 2 and b.w.shape == a.w.shape == (1, 21, 1)
    np.testing.assert_allclose(a.evaluate(log_alpha).gradient, b.evaluate(log_alpha).gradient, rtol=1e-10)
    halved = (
        b.restricted(halves.only(0)).evaluate(log_alpha).value,
        b.restricted(halves.only(1)).evaluate(log_alpha).value,
    )
    assert np.mean(halved) == pytest.approx(a.evaluate(log_alpha).value, rel=1e-10)
    twice = replace(whole, train=np.repeat(whole.train, 2, 0), val=np.repeat(whole.val, 2, 0))
    assert twice.merged() is twice


def test_restricted_folds_are_the_criterion_of_the_rows_that_are_left():
    X, y, weight, log_alpha = table(40, 8, 1)
    criterion = criteria("ridge", X, y, weight, True)[0]
    rest = criterion.restricted(criterion.folds.without(1))
    left = ~criterion.folds.val[1][criterion.folds.cell]
    folds = criterion.folds
    by_hand = replace(
        folds,
        cell=folds.cell[left],
        weight=folds.weight[left],
        train=folds.train[[0, 2]] & ~folds.val[1],
        val=folds.val[[0, 2]],
    )
    same = KernelEquations(X[left], y[left], by_hand, True)
    assert rest.evaluate(log_alpha).value == pytest.approx(same.evaluate(log_alpha).value, rel=1e-12)


def test_moments_add_up_to_those_of_all_rows_whatever_the_splitter():
    from sklearn.model_selection import ShuffleSplit

    X, y, weight, log_alpha = table(40, 8, 1)
    folds = split(ShuffleSplit(4, test_size=0.3, random_state=1), X, y[:, 0], weight, classes=False, random_state=None)
    by_cells = NormalEquations.of(X, y, folds, True, False).evaluate(log_alpha)
    by_rows = KernelEquations(X, y, folds, True).evaluate(log_alpha)
    assert by_cells.value == pytest.approx(by_rows.value, rel=1e-12)


def test_a_hold_out_in_two_halves_is_the_hold_out():
    X, y, weight, log_alpha = table(40, 8, 1)
    whole, halves = (
        split(0.3, X, y[:, 0], weight, classes=False, random_state=0, halve_holdout=halve) for halve in (False, True)
    )
    assert (whole.count, halves.count) == (1, 2)
    a, b = (KernelEquations(X, y, folds, True).evaluate(log_alpha) for folds in (whole, halves))
    assert a.value == pytest.approx(b.value, rel=1e-12)
    np.testing.assert_allclose(a.gradient, b.gradient, rtol=1e-10)


def test_the_tether_is_zero_for_equal_penalties_and_its_gradient_right():
    lam = np.random.default_rng(0).normal(size=5) * 3
    assert tether(np.full(4, 2.5))[0] == pytest.approx(0, abs=1e-12)
    differences = [(tether(lam + 1e-6 * e)[0] - tether(lam - 1e-6 * e)[0]) / 2e-6 for e in np.eye(5)]
    np.testing.assert_allclose(tether(lam)[1], differences, atol=1e-8)


def test_groups_may_have_any_names():
    groups = grouping(["b", "a", "b"], 3)
    assert groups.count == 2
    np.testing.assert_array_equal(groups.spread(np.array([1.0, 2.0])), [2, 1, 2])
    np.testing.assert_array_equal(groups.gather(np.array([1.0, 10.0, 100.0])), [10, 101])
