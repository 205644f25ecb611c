"""What users of scikit-learn expect of an estimator: scorers, threads, deviations, several targets, tensors."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import Lasso, LogisticRegression, Ridge, RidgeCV
from sklearn.metrics import balanced_accuracy_score, make_scorer, r2_score, roc_auc_score
from sklearn.model_selection import KFold, LeaveOneOut, StratifiedKFold, cross_val_predict, cross_val_score

from bilevel.errors import BilevelError
from bilevel.estimators import (
    BilevelAdditiveClassifier,
    BilevelAdditiveRegressor,
    BilevelLasso,
    BilevelLogisticRegression,
    BilevelRidge,
)
from bilevel.progress import heartbeat


def table(rows=80, features=20, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows + 2000, features))
    y = X[:, :3] @ [2.0, -1.0, 1.0] + rng.normal(size=len(X)) + 3
    return X[:rows], y[:rows], X[rows:], y[rows:]


@pytest.mark.parametrize("scoring", ["roc_auc", "balanced_accuracy"])
def test_a_scorer_judges_the_rows_that_folds_hold_out(scoring):
    X, y = load_breast_cancer(return_X_y=True)
    X, names = X[:150] / X.std(0), np.array(["no", "yes"])[y[:150]]
    cv = StratifiedKFold(3)
    model = BilevelLogisticRegression("shared", cv=cv, scoring=scoring).fit(X, names)
    rival = LogisticRegression(C=1 / model.alpha_, tol=1e-8, max_iter=1000)
    np.testing.assert_allclose(model.cv_score_, cross_val_score(rival, X, names, cv=cv, scoring=scoring), atol=1e-9)
    by_hand = {
        "roc_auc": roc_auc_score(names, model.decision_function(X)),
        "balanced_accuracy": balanced_accuracy_score(names, model.predict(X)),
    }
    assert model.score(X, names) == pytest.approx(by_hand[scoring])
    plain = BilevelLogisticRegression("shared", cv=cv).fit(X, names)
    assert plain.alpha_ == model.alpha_ and not hasattr(plain, "cv_score_")
    assert plain.score(X, names) == pytest.approx((plain.predict(X) == names).mean())


def test_a_scorer_judges_rows_that_are_left_out_singly():
    X, y, *_ = table()
    for wide in (X, np.hstack([X, X[:, ::-1] ** 2, X**3, X[:, ::-1] ** 3])[:50]):
        target = y[: len(wide)]
        model = BilevelRidge("shared", scoring="r2").fit(wide, target)
        left_out = cross_val_predict(Ridge(model.alpha_), wide, target, cv=LeaveOneOut())
        assert model.cv_score_ == pytest.approx([r2_score(target, left_out)], rel=1e-6)


def test_scorers_get_weights_and_may_be_functions():
    X, y, *_ = table()
    weight, cv = np.random.default_rng(1).integers(1, 4, size=80).astype(float), KFold(4)
    error = make_scorer(lambda a, b, sample_weight=None: np.average(np.abs(a - b), weights=sample_weight))
    model = BilevelLasso("shared", cv=cv, scoring=error).fit(X, y, sample_weight=weight)
    expected = [
        np.average(np.abs(y[b] - Lasso(model.alpha_).fit(X[a], y[a], weight[a]).predict(X[b])), weights=weight[b])
        for a, b in cv.split(X)
    ]
    np.testing.assert_allclose(model.cv_score_, expected, rtol=1e-3)
    assert model.score(X, y, weight) == pytest.approx(np.average(np.abs(y - model.predict(X)), weights=weight))
    assert model.fit(X, y).cv_score_.shape == (4,)
    model.set_params(scoring=None).fit(X, y)
    assert not hasattr(model, "cv_score_")
    with pytest.raises(ValueError, match="no such score"):
        BilevelRidge(scoring="no such score").fit(X, y)


def test_threads_are_as_asked_during_the_fit_and_as_before_after_it(monkeypatch):
    X, y, *_ = table()
    before, seen = torch.get_num_threads(), []
    solved = torch.linalg.cholesky_ex
    monkeypatch.setattr(
        torch.linalg, "cholesky_ex", lambda *args: seen.append(torch.get_num_threads()) or solved(*args)
    )
    models = [BilevelRidge("shared", n_jobs=jobs).fit(X, y) for jobs in (1, 2, None)]
    assert set(seen) == {1, 2, before} and torch.get_num_threads() == before
    assert len({model.alpha_ for model in models}) == 1


def test_deviations_hold_what_they_promise():
    X, y, X_test, y_test = table(60, 10)
    model = BilevelRidge().fit(X, y)
    mean, deviation = model.predict(X_test, return_std=True)
    np.testing.assert_array_equal(mean, model.predict(X_test))
    assert np.mean(np.abs(y_test - mean) < 1.645 * deviation) == pytest.approx(0.9, abs=0.04)
    farther = model.predict(10 * X_test, return_std=True)[1]
    assert (farther > deviation).mean() > 0.95


@pytest.mark.parametrize(("features", "cv"), [(10, None), (10, 5), (100, None), (100, 5)])
def test_deviations_are_those_of_bayesian_ridge_regression_at_the_penalty(features, cv):
    X, y, X_test, _ = table(60, features)
    model = BilevelRidge("shared", cv=cv).fit(X, y)
    A = (X - X.mean(0)).T @ (X - X.mean(0)) + model.alpha_ * np.eye(features)
    away = X_test - X.mean(0)
    variance = 1 + 1 / 60 + np.einsum("ij,jk,ik->i", away, np.linalg.inv(A), away)
    fit = X - X.mean(0)
    hat = fit @ np.linalg.solve(A, fit.T) + 1 / 60
    noise = np.mean((y - model.predict(X)) ** 2 / (1 - hat.diagonal()))
    np.testing.assert_allclose(model.predict(X_test, return_std=True)[1], np.sqrt(noise * variance), rtol=1e-3)


@pytest.mark.parametrize("as_table", [np.array, sparse.csr_matrix])
@pytest.mark.parametrize("intercept", [True, False])
def test_deviations_are_those_of_the_fit_although_table_and_settings_change_after_it(as_table, intercept):
    X, y, X_test, _ = table()
    given = as_table(X)
    model, other = (BilevelRidge("shared", fit_intercept=intercept).fit(rows, y) for rows in (given, as_table(X)))
    expected = other.predict(X_test, return_std=True)[1]
    (given.data if sparse.issparse(given) else given)[:] = 3
    model.set_params(fit_intercept=not intercept)
    np.testing.assert_array_equal(model.predict(X_test, return_std=True)[1], expected)
    assert str(model.certificate_) == str(other.certificate_)


def test_deviations_of_many_features_are_refused(monkeypatch):
    monkeypatch.setattr("bilevel.estimators.ridge.MAX_STD_FEATURES", 19)
    X, y, *_ = table()
    with pytest.raises(BilevelError, match=r"at most 19 features\. This table has 20"):
        BilevelRidge("shared").fit(X, y).predict(X, return_std=True)


def test_every_target_has_penalties_of_its_own():
    X, y, *_ = table()
    Y = np.stack([y, np.random.default_rng(1).normal(size=80)], axis=1)
    model = BilevelRidge("shared", alpha_per_target=True, scoring="r2").fit(X, Y)
    rival = RidgeCV(np.logspace(-2, 5, 200), alpha_per_target=True).fit(X, Y)
    np.testing.assert_allclose(np.log(model.alpha_[0] / rival.alpha_[0]), 0, atol=0.1)
    assert model.alpha_[1] > 10 * model.alpha_[0]
    for threads in (1, 2):
        each = BilevelRidge(alpha_per_target=True, n_jobs=threads).fit(X, Y)
        alone = [BilevelRidge().fit(X, Y[:, k]) for k in (0, 1)]
        assert each.alpha_.shape == each.coef_.shape == (2, 20)
        np.testing.assert_array_equal(each.alpha_, [one.alpha_ for one in alone])
        np.testing.assert_allclose(each.predict(X), np.stack([one.predict(X) for one in alone], 1))
    assert each.predict(X, return_std=True)[1].shape == (80, 2) and model.cv_score_.shape == (2, 1)
    again = BilevelRidge(alpha_per_target=True, warm_start=True).fit(X, Y)
    cold = again.n_iter_
    assert again.fit(X, Y).n_iter_ < cold


def test_attributes_of_an_earlier_fit_are_removed():
    X, y, *_ = table()
    Y = np.stack([y, np.random.default_rng(1).normal(size=80)], axis=1)
    model = BilevelRidge("shared", alpha_per_target=True).fit(X, Y).fit(X, y)
    expected = BilevelRidge("shared").fit(X, y).predict(X, return_std=True)
    np.testing.assert_array_equal(model.predict(X, return_std=True), expected)
    model.fit(X, Y)
    assert not hasattr(model, "certificate_") and hasattr(model.estimators_[0], "certificate_")


DISPATCH = """
import numpy as np, torch
from sklearn import config_context
from sklearn.datasets import load_diabetes
from sklearn.linear_model import RidgeCV
from bilevel.estimators import BilevelLogisticRegression, BilevelRidge
X, y = load_diabetes(return_X_y=True)
rows, goal = torch.tensor(X), torch.tensor(y)
plain = BilevelRidge("shared").fit(X, y)
for model in (BilevelRidge("shared"), RidgeCV()):
    assert isinstance(model.fit(rows, goal).predict(rows), np.ndarray)
    with config_context(array_api_dispatch=True):
        model.fit(rows.float(), goal.float(), sample_weight=torch.ones(442))
        for found in (model.coef_, model.intercept_, model.predict(rows.float())):
            assert isinstance(found, torch.Tensor) and found.dtype == torch.float32
        assert isinstance(model.score(rows.float(), goal.float()), float)
with config_context(array_api_dispatch=True):
    model = BilevelRidge("shared").fit(rows, goal)
    np.testing.assert_allclose(model.coef_.numpy(), plain.coef_, rtol=1e-9)
    assert model.predict(rows, return_std=True)[1].dtype == torch.float64
    classes = BilevelLogisticRegression("shared", max_iter=3).fit(rows, goal > 100)
    assert classes.predict_proba(rows).shape == (442, 2) and classes.predict(rows).dtype == torch.bool
print("the same")
"""


@pytest.mark.slow
def test_tensors_are_taken_as_ridge_cv_takes_them():
    environment = {**os.environ, "SCIPY_ARRAY_API": "1"}
    found = subprocess.run([sys.executable, "-c", DISPATCH], env=environment, capture_output=True, text=True)
    assert found.stdout == "the same\n", found.stderr


@pytest.mark.parametrize("estimator", [BilevelRidge, BilevelLasso, BilevelAdditiveRegressor])
def test_a_long_fit_says_how_far_it_is(estimator, monkeypatch, capfd):
    """Progress lines appear only if a fit takes longer than a limit, which is short in this test."""
    X, y, *_ = table(40, 5)
    module = sys.modules[estimator.__module__.rsplit(".", 1)[0] + ".base"]
    for first, verbose in ((600.0, None), (0.001, False), (0.001, None)):
        monkeypatch.setattr(module, "heartbeat", lambda quiet=False, first=first: heartbeat(quiet, first, 0.01))
        estimator(max_iter=3, verbose=verbose).fit(X, y)
        lines = capfd.readouterr().err.splitlines()
        assert bool(lines) == (first < 1 and verbose is None)
    assert estimator.__name__ in lines[-1] and "hypergradients, criterion" in lines[-1]


def test_a_heartbeat_inside_another_is_quiet(capsys):
    with heartbeat(first=0.01, between=0.01) as outer:
        outer("outside")
        with heartbeat(first=0.01, between=0.01) as inner:
            inner("inside")
            time.sleep(0.1)
    assert "outside" in (said := capsys.readouterr().err) and "inside" not in said


@pytest.mark.parametrize("estimator", [BilevelLogisticRegression, BilevelAdditiveClassifier])
def test_balanced_classes_have_the_same_total_with_the_weights_of_the_rows(estimator):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(90, 3))
    y = (X[:, 0] + rng.normal(size=90) > 0.5).astype(int)
    weight = rng.integers(0, 4, 90).astype(float)
    of_class = weight.sum() / (2 * np.bincount(y, weight))
    model = estimator(class_weight="balanced", max_iter=5).fit(X, y, weight)
    by_row = estimator(max_iter=5).fit(X, y, weight * of_class[y])
    np.testing.assert_allclose(model.predict_proba(X), by_row.predict_proba(X), rtol=1e-6)
