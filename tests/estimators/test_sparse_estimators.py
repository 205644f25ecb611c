"""The lasso and the elastic net: ratios, signs, groups of rows, and weights of classes."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes
from sklearn.linear_model import ElasticNet, ElasticNetCV, Lasso, LassoCV
from sklearn.model_selection import GroupKFold, TimeSeriesSplit
from sklearn.utils.class_weight import compute_sample_weight

from bilevel.errors import BilevelError
from bilevel.estimators import BilevelElasticNet, BilevelLasso, BilevelLogisticRegression, BilevelRidge
from bilevel.estimators.folds import split
from bilevel.estimators.hyperparameters import Grouping
from bilevel.estimators.sums_of_table import SumsOfTable
from bilevel.hypergradients import hypergradient


def table(rows=80, features=20, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows + 1000, features))
    y = X[:, :3] @ [2.0, -1.0, 1.0] + rng.normal(size=len(X))
    return X[:rows], y[:rows], X[rows:], y[rows:]


def test_the_lasso_is_scikit_learns_at_its_penalty_and_as_good_as_its_cross_validation():
    X, y, X_test, y_test = table()
    model = BilevelLasso("shared").fit(X, y)
    np.testing.assert_allclose(model.coef_, Lasso(model.alpha_, tol=1e-12, max_iter=100_000).fit(X, y).coef_, atol=1e-6)
    assert model.score(X_test, y_test) > LassoCV(cv=5).fit(X, y).score(X_test, y_test) - 0.01
    assert BilevelLasso().fit(X, y).score(X_test, y_test) > model.score(X_test, y_test) - 0.01
    assert "l1_ratio" not in model.get_params()


def test_of_a_list_of_ratios_the_best_is_taken():
    X, y, *_ = table()
    ratios = [0.1, 0.9]
    model = BilevelElasticNet("shared", l1_ratio=ratios, cv=5).fit(X, y)
    each = [BilevelElasticNet("shared", l1_ratio=ratio, cv=5).fit(X, y) for ratio in ratios]
    values = [one.history_["value"].min() for one in each]
    assert model.l1_ratio_ == ratios[int(np.argmin(values))] == ElasticNetCV(l1_ratio=ratios).fit(X, y).l1_ratio_
    for wrong in ([], [0.5, 2.0], "half"):
        with pytest.raises(BilevelError, match="l1_ratio="):
            BilevelElasticNet(l1_ratio=wrong).fit(X, y)


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.5, [0.1, 0.5], "tuned"])
@pytest.mark.parametrize("unit", [1e-6, 1e5])
def test_the_best_penalty_is_found_in_every_unit_of_the_target(unit, ratio):
    """In a large unit the penalty of |w| hardly matters, and a small penalty of w² is best."""
    X, y, *_ = table()
    folds = split(5, X, y, np.ones(len(y)), classes=False, random_state=0)
    model = BilevelElasticNet("shared", l1_ratio=ratio).fit(X, unit * y)
    errors = []
    for penalty in np.geomspace(1e-5, 1.0, 6) * min(unit, 1.0):
        rival = ElasticNet(penalty, l1_ratio=model.l1_ratio_, tol=1e-8, max_iter=100_000)
        splits = zip(folds.train_weights() > 0, folds.val_weights() > 0, strict=True)
        errors += [sum(((rival.fit(X[a], y[a] * unit).predict(X[b]) / unit - y[b]) ** 2).sum() for a, b in splits)]
    assert 2 * model.history_["value"].min() / unit**2 <= 1.0001 * min(errors) / len(y)


def test_no_coefficient_is_negative_where_none_may_be():
    X, y, *_ = table()
    model = BilevelLasso("shared", positive=True).fit(X, y)
    assert model.coef_.min() >= 0 and model.coef_[0] > 1
    rival = Lasso(model.alpha_, positive=True, tol=1e-12, max_iter=100_000).fit(X, y)
    np.testing.assert_allclose(model.coef_, rival.coef_, atol=1e-6)


def test_groups_of_rows_stay_together():
    X, y, *_ = table()
    groups = np.repeat(np.arange(8), 10)
    # Rows of a group are copies. Without groups, every fold trains on copies of its validation rows.
    X, y = X[groups], y[groups]
    apart = BilevelRidge("shared").fit(X, y, groups=groups)
    by_hand = BilevelRidge("shared", cv=list(GroupKFold(5, shuffle=True, random_state=0).split(X, y, groups))).fit(X, y)
    assert apart.alpha_ == by_hand.alpha_ > BilevelRidge("shared").fit(X, y).alpha_
    classes = BilevelLogisticRegression("shared", cv=2).fit(X, (y > np.median(y)).astype(int), groups=groups)
    assert classes.coef_.shape == (1, 20)
    with pytest.raises(ValueError, match="inconsistent"):
        BilevelRidge().fit(X, y, groups=groups[:-1])
    with pytest.raises(BilevelError, match="1 group"):
        BilevelRidge().fit(X, y, groups=np.zeros(80))


def test_time_series_splits():
    X, y, X_test, y_test = table()
    assert BilevelRidge(cv=TimeSeriesSplit(4)).fit(X, y).score(X_test, y_test) > 0.7


def test_weights_of_classes_are_weights_of_rows():
    X, y, *_ = table()
    rare = (y > 2).astype(int)
    model = BilevelLogisticRegression("shared", cv=3, class_weight="balanced").fit(X, rare)
    weight = compute_sample_weight("balanced", rare)
    other = BilevelLogisticRegression("shared", cv=3).fit(X, rare, sample_weight=weight)
    np.testing.assert_array_equal(model.coef_, other.coef_)
    plain = BilevelLogisticRegression("shared", cv=3).fit(X, rare)
    assert model.predict(X).mean() > plain.predict(X).mean()


def ratio_problem(rows=50):
    rng = np.random.default_rng(3)
    X = rng.normal(size=(rows, 12)) + rng.normal(size=(rows, 1))
    y = X[:, :6].sum(1) + 2 * rng.normal(size=rows)
    folds = split(5, X, y, np.ones(rows), classes=False, random_state=0)
    shared = Grouping(np.zeros(12, dtype=int))
    return X, y, folds, SumsOfTable(X - X.mean(0), (y - y.mean())[:, None], folds, shared, True, "tuned")


def test_the_hypergradient_in_a_ratio_is_that_of_differences():
    *_, folds, table = ratio_problem()
    task = table.task(folds)
    settings = {"dynamics": table.dynamics(task), "steps": 0, "start": table.start(task), "method": table.method(0.0)}

    def at(point):
        return hypergradient(table.problem, torch.tensor(point, dtype=torch.float64), task, **settings)

    for point in ([-2.0, 0.3], [0.0, -1.0], [-1.0, 2.0]):
        slopes = [(at(np.add(point, d)).value - at(np.subtract(point, d)).value) / 2e-6 for d in 1e-6 * np.eye(2)]
        np.testing.assert_allclose(at(point).grad, slopes, rtol=1e-5, atol=1e-8)


def test_a_ratio_tuned_with_the_penalty_is_no_worse_than_any_of_a_list():
    X, y, folds, _ = ratio_problem()
    cv = [
        (np.flatnonzero(train), np.flatnonzero(val))
        for train, val in zip(folds.train_weights(), folds.val_weights(), strict=True)
    ]
    model = BilevelElasticNet("shared", l1_ratio="tuned", cv=cv).fit(X, y)
    values = [
        BilevelElasticNet("shared", l1_ratio=ratio, cv=cv).fit(X, y).history_["value"].min()
        for ratio in (0.05, 0.1, 0.5, 0.9, 0.95)
    ]
    assert 0 < model.l1_ratio_ < 1 and model.l1_ratio_ not in (0.1, 0.5, 0.9)
    assert model.history_["value"].min() <= min(values) * (1 + 1e-4)
    each = BilevelElasticNet(l1_ratio="tuned", cv=cv, tether=1.0, max_iter=5).fit(X, y)
    assert each.l1_ratio_ == pytest.approx(model.l1_ratio_, abs=0.01)


def test_the_tether_does_not_depend_on_which_rows_share_a_fold(monkeypatch):
    """Penalties of features differ only if the gain is larger than the variation between random folds."""
    X, y = load_diabetes(return_X_y=True)
    X, y = (X / X.std(0))[:150], y[:150]
    assert {BilevelLasso(random_state=seed).fit(X, y).tether_ for seed in (0, 1, 3)} == {np.inf}
    monkeypatch.setattr("bilevel.estimators.sums_of_table.FEATURE_STANDARD_ERRORS", 0.5)
    assert BilevelLasso(random_state=3).fit(X, y).tether_ < np.inf
