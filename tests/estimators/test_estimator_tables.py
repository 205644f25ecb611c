"""The estimators' bilevel problems: all methods agree with each other and with scikit-learn, and use the engine."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.linear_model import ElasticNet, LogisticRegression, Ridge
from sklearn.model_selection import ShuffleSplit

from bilevel.estimators import BilevelElasticNet, BilevelLogisticRegression, BilevelRidge, search, sums_of_table
from bilevel.estimators.folds import _unique_rows, single_fold, split
from bilevel.estimators.hyperparameters import Tether, grouping
from bilevel.estimators.rows_left_out import RowsLeftOut
from bilevel.estimators.rows_of_table import RowsOfTable
from bilevel.estimators.search import PenaltySearch
from bilevel.estimators.sums_of_table import SumsOfTable
from bilevel.estimators.tensors import on_cpu
from bilevel.methods.linear_models import NewtonLinear
from bilevel.structures import LogLoss, SquaredError
from bilevel.structures.penalties import GroupPenalties


@pytest.mark.parametrize("width", [2, 9, 16, 64, 65])
def test_unique_rows_are_those_of_numpy(width):
    masks = np.repeat(np.random.default_rng(width).random((60, width)) < 0.5, 2, axis=0)
    expected, place = np.unique(masks, axis=0, return_inverse=True)
    found, ours = _unique_rows(masks)
    assert found.dtype == bool and np.array_equal(found, expected) and np.array_equal(ours, place.reshape(-1))


def test_tensors_are_made_on_the_cpu_and_calls_of_torch_are_not_slowed_down():
    with on_cpu():
        assert not torch.overrides._get_current_function_mode_stack()
    with torch.device("meta"), on_cpu():
        assert torch.ones(1).device.type == "cpu"


def numbers(rows=40, features=8, outputs=1, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, features)) + 1
    y = 2 * X[:, :outputs] + rng.normal(size=(rows, outputs)) + 3
    weight = rng.uniform(0.5, 2, rows)
    weight[3] = 0
    return X, y, weight, torch.from_numpy(rng.normal(size=features))


def classes(X, outputs):
    codes = (X[:, 0] > 1).astype(int) + (outputs > 1) * (X[:, 1] > 1)
    return codes, np.eye(3)[codes] if outputs > 1 else np.eye(2)[codes][:, 1:]


def searched(table, folds):
    return PenaltySearch(table, folds, table.penalties.features, (-9.0, 9.0), 50, 1e-9)


def same(one, other, lam, tolerance=1e-9):
    a, b = one.evaluate(lam), other.evaluate(lam)
    assert float(a.value) == pytest.approx(float(b.value), rel=tolerance)
    np.testing.assert_allclose(a.grad, b.grad, rtol=1e2 * tolerance, atol=tolerance)


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("outputs", [1, 2])
def test_sums_and_rows_are_the_same_ridge(outputs, intercept):
    X, y, weight, lam = numbers(outputs=outputs)
    every = grouping("per-feature", 8)
    for cv in (3, ShuffleSplit(4, test_size=0.3, random_state=1)):
        folds = split(cv, X, y[:, 0], weight, classes=False, random_state=0)
        first = searched(SumsOfTable(X, y, folds, every, intercept), folds)
        for given in (X, sparse.csr_matrix(X)):
            same(first, searched(SumsOfTable(given, y, folds, every, intercept), folds), lam)
            rows = RowsOfTable(given, y, folds, every, intercept, SquaredError())
            same(first, searched(rows, folds), lam)
            rows.make_method = NewtonLinear
            same(first, searched(rows, folds), lam)


@pytest.mark.parametrize("intercept", [True, False])
def test_an_elastic_net_with_many_features_needs_no_matrix_of_them(monkeypatch, intercept):
    X, y, weight, lam = numbers(outputs=2)
    folds, every = split(3, X, y[:, 0], weight, classes=False, random_state=0), grouping("per-feature", 8)
    lam = 0.4 * lam - 1
    narrow = searched(SumsOfTable(X, y, folds, every, intercept, 0.6), folds)
    thin = searched(SumsOfTable(sparse.csr_matrix(X), y, folds, every, intercept, 0.6), folds)
    monkeypatch.setattr(sums_of_table, "MAX_DENSE_FEATURES", 2)
    for given in (X, sparse.csr_matrix(X)):
        wide = SumsOfTable(given, y, folds, every, intercept, 0.6)
        assert wide.wide
        same(narrow, searched(wide, folds), lam)
    same(narrow, thin, lam)


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("sparsely", [False, True])
def test_training_on_all_rows_is_scikit_learns_fit_at_equal_penalties(intercept, sparsely):
    X, y, weight, _ = numbers(outputs=2)
    codes, indicators = classes(X, 2)
    given, shared = sparse.csr_matrix(X) if sparsely else X, grouping("shared", 8)
    lam = torch.full((1,), np.log(0.7))
    folds = split(3, X, y[:, 0], weight, classes=False, random_state=0)
    everything = np.ones((1, folds.train.shape[1]), dtype=bool)
    whole = replace(folds, train=everything, val=everything)
    settings = {"fit_intercept": intercept, "tol": 1e-12}
    for table, rival in [
        (SumsOfTable(given, y, folds, shared, intercept), Ridge(0.7, **settings)),
        (RowsOfTable(given, y, folds, shared, intercept, SquaredError()), Ridge(0.7, **settings)),
        (
            SumsOfTable(given, y, folds, shared, intercept, 0.6),
            ElasticNet(0.7, l1_ratio=0.6, max_iter=100_000, **settings),
        ),
    ]:
        coef, b = table.coefficients(searched(table, whole).evaluate(lam).inner, whole)
        rival.fit(X, y, sample_weight=weight)
        np.testing.assert_allclose(coef.T, rival.coef_, atol=1e-8)
        np.testing.assert_allclose(b, rival.intercept_, atol=1e-8)
    rival = LogisticRegression(C=1 / 0.7, max_iter=10_000, **settings).fit(X, codes, sample_weight=weight)
    for dense in (True, False):
        table = RowsOfTable(given, indicators, folds, shared, intercept, LogLoss())
        table.make_method = partial(NewtonLinear, dense=dense)
        coef, b = table.coefficients(searched(table, whole).evaluate(lam).inner, whole)
        np.testing.assert_allclose(coef.T, rival.coef_, atol=1e-5)
        np.testing.assert_allclose(b - b.mean(), rival.intercept_ - np.mean(rival.intercept_), atol=1e-5)


@pytest.mark.parametrize("outputs", [1, 2])
def test_the_curvatures_told_to_the_certificate_are_bounds(outputs):
    X, y, weight, lam = numbers(outputs=outputs)
    folds, every = split(3, X, y[:, 0], weight, classes=False, random_state=0), grouping("per-feature", 8)
    indicators = classes(X, outputs)[1]
    for table in (
        SumsOfTable(X, y, folds, every, True),
        RowsOfTable(X, y, folds, every, True, SquaredError()),
        RowsOfTable(X, y, folds, every, False, SquaredError()),
        RowsOfTable(X, indicators, folds, every, True, LogLoss()),
    ):
        found = searched(table, folds)
        w = found.evaluate(lam).inner
        low, high = table.curvature(lam, found.task, w)
        hessian = torch.autograd.functional.hessian(
            lambda w, t=table, f=found: t.problem.inner(w, lam, f.task.train), w
        )
        true = torch.linalg.eigvalsh(hessian.reshape(w.numel(), -1))
        assert 0.001 * float(true[0]) < low <= float(true[0]) * (1 + 1e-9)
        assert high is None or float(true[-1]) * (1 - 1e-9) <= high <= 1.001 * float(true[-1])


@pytest.mark.parametrize("estimator", [BilevelRidge, BilevelElasticNet, BilevelLogisticRegression])
def test_every_evaluation_of_the_criterion_goes_through_the_engine(monkeypatch, estimator):
    X, y, _, _ = numbers()
    calls = {"hypergradient": 0, "solve": 0}

    def counted(name):
        original = getattr(search, name)

        def call(*args, **settings):
            calls[name] += 1
            return original(*args, **settings)

        monkeypatch.setattr(search, name, call)

    counted("hypergradient")
    counted("solve")
    goal = classes(X, 1)[0] if estimator is BilevelLogisticRegression else y[:, 0]
    estimator(cv=3, tether=1.0, max_iter=5).fit(X, goal)
    # One search with a shared penalty and two with tethers. Before them a grid of eleven points; after them the
    # certificate and the fit to all rows.
    assert calls["solve"] == 3
    assert calls["hypergradient"] >= 14


def test_the_tether_is_zero_for_equal_penalties_and_grows_with_their_distance():
    assert float(Tether()(torch.full((4,), 2.5).double(), 1.0)) == pytest.approx(0, abs=1e-12)
    near, far = (float(Tether()(torch.tensor([0.0, d]).double(), 1.0)) for d in (1e-3, 40.0))
    assert near == pytest.approx(2 * 0.5 * 2 * (0.5e-3) ** 2, rel=1e-3)
    assert far == pytest.approx(2 * 2 * (20 - np.log(2)), rel=1e-9)


@pytest.mark.parametrize("groups", [None, torch.tensor([1, 0, 1, 2])], ids=["per-feature", "groups"])
@pytest.mark.parametrize("size", [1, 0], ids=["one", "several"])
def test_derivatives_written_by_hand_are_those_of_autograd(groups, size):
    penalties = GroupPenalties(4, groups, scale=0.3)
    lam = torch.randn(size or (4 if groups is None else 3), generator=torch.manual_seed(0)).double().requires_grad_()
    weight = torch.tensor(0.7).double()
    for function, data in ((penalties, ()), (Tether(), (weight,))):
        wanted = function(lam, *data)
        v = torch.arange(1.0, 1 + wanted.numel()).double().reshape(wanted.shape)
        (slope,) = torch.autograd.grad(wanted, lam, v)
        with torch.no_grad():
            found, pullback = function.linearised(lam, *data)
            torch.testing.assert_close(found, wanted.detach())
            torch.testing.assert_close(pullback(v), slope)


def test_groups_may_have_any_names():
    groups = grouping(["b", "a", "b"], 3)
    assert groups.count == 2
    np.testing.assert_array_equal(groups.of, [1, 0, 1])
    np.testing.assert_array_equal(groups.mean(np.array([1.0, 10.0, 100.0])), [10, 50.5])


def test_left_out_errors_of_an_almost_exact_fit_keep_their_digits():
    """More features than rows, a tiny penalty, and an intercept, against fits to all other rows."""
    rng, alpha = np.random.default_rng(0), 1e-6
    X, weight = 5 * rng.normal(size=(40, 60)), rng.integers(1, 4, 40).astype(float)
    y = X[:, 0] + rng.normal(size=40)
    errors = []
    for row in range(40):
        others = np.arange(40) != row
        share, root = weight[others] / weight[others].sum(), np.sqrt(weight[others])
        mean, level = share @ X[others], share @ y[others]
        rows = root[:, None] * (X[others] - mean)
        dual = np.linalg.solve(rows @ rows.T + alpha * np.eye(39), root * (y[others] - level))
        errors.append(y[row] - level - (X[row] - mean) @ rows.T @ dual)
    folds = single_fold(weight)
    table = RowsLeftOut(X, y[:, None], folds, grouping("shared", 60), True)
    lam = torch.tensor([np.log(alpha)])
    found = PenaltySearch(table, folds, 1, (-20.0, 20.0), 1, 1e-3).evaluate(lam)
    assert 2 * float(found.value) == pytest.approx(np.average(np.square(errors), weights=weight), rel=1e-5)
    ((_, scores),) = table.held_out_scores(found.inner, folds, lam)
    np.testing.assert_allclose(y - scores[:, 0], errors, rtol=1e-4)
