"""Shifts, scales and constant features do not change the result."""

import functools

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.linear_model import Ridge

from bilevel.errors import BilevelError
from bilevel.estimators import BilevelElasticNet, BilevelLogisticRegression, BilevelRidge

ALL = [BilevelRidge, BilevelElasticNet, BilevelLogisticRegression]
ids = {"ids": lambda value: getattr(value, "__name__", str(value))}


def table(rows=60, features=5, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, features))
    return X, X[:, 0] - X[:, 1] + 0.5 * rng.normal(size=rows)


def target_of(estimator, y):
    return (y > 0).astype(int) if estimator is BilevelLogisticRegression else y


@functools.cache
def fitted_to_a_shifted_table(estimator, penalty, shift):
    X, y = table()
    # Multiples of 1/8, so that the shift causes no rounding.
    X = np.round(X * 8) / 8
    settings = {"penalty": [0, 0, 1, 1, 2] if penalty == "groups" else penalty, "cv": 3, "tether": 0.5}
    return estimator(**settings).fit(X + shift * np.arange(5), target_of(estimator, y))


@pytest.mark.parametrize("estimator", ALL, **ids)
@pytest.mark.parametrize("penalty", ["shared", "per-feature", "groups"])
@pytest.mark.parametrize("shift", [1e2, 2.0**20, 2.0**27])
def test_an_intercept_makes_up_for_any_shift_of_a_feature(estimator, penalty, shift):
    here, there = (fitted_to_a_shifted_table(estimator, penalty, by) for by in (0.0, shift))
    np.testing.assert_allclose(there.coef_, here.coef_, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(np.log(there.alpha_), np.log(here.alpha_), atol=2e-3)
    assert np.abs(here.coef_).max() > 0.5


@pytest.mark.parametrize("rows", [20, 60])
def test_a_shift_of_the_target_is_the_intercept(rows):
    X, y = table(rows, 30)
    y = np.round(y * 64) / 64
    here, there = (BilevelRidge(cv=3, tether=0.5).fit(X, y + shift) for shift in (0, 2.0**30))
    np.testing.assert_allclose(there.coef_, here.coef_, rtol=1e-3, atol=1e-5)
    assert there.intercept_ - 2.0**30 == pytest.approx(here.intercept_, abs=1e-4)


@functools.cache
def fitted_to_five_columns(estimator, kind):
    X, y = table()
    return estimator(cv=3, tether=0).fit(kind(X), target_of(estimator, y))


@pytest.mark.parametrize("estimator", ALL, **ids)
@pytest.mark.parametrize("constant", [0.1, 7.0, 123.456, 1e6 / 3])
@pytest.mark.parametrize("kind", [np.asarray, sparse.csr_matrix], ids=["dense", "sparse"])
def test_a_constant_column_changes_no_other_coefficient(estimator, constant, kind):
    X, y = table()
    goal = target_of(estimator, y)
    without = fitted_to_five_columns(estimator, kind)
    beside = estimator(cv=3, tether=0).fit(kind(np.c_[X, np.full(len(X), constant)]), goal)
    others, flat = np.ravel(beside.coef_)[:5], np.ravel(beside.coef_)[5]
    np.testing.assert_allclose(others, np.ravel(without.coef_), rtol=0.02, atol=0.02)
    # A constant feature can only replace the intercept.
    assert float(np.ravel(beside.intercept_ + flat * constant)[0]) == pytest.approx(
        np.ravel(without.intercept_)[0], abs=0.02
    )


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("kind", [np.asarray, sparse.csr_matrix], ids=["dense", "sparse"])
@pytest.mark.parametrize("estimator", [BilevelRidge, BilevelLogisticRegression], **ids)
def test_groups_mean_the_same_in_any_unit(estimator, kind, intercept):
    X, y = table()
    groups, unit = np.array([0, 1, 1, 2, 1]), np.array([1e-6, 1.0, 1.0, 1e6, 1.0])
    settings = {"penalty": groups, "cv": 3, "tether": 0.5, "fit_intercept": intercept}
    plain = estimator(**settings).fit(kind(X), target_of(estimator, y))
    scaled = estimator(**settings).fit(kind(X * unit), target_of(estimator, y))
    np.testing.assert_allclose(scaled.coef_ * unit, plain.coef_, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(scaled.alpha_ / unit**2, plain.alpha_, rtol=2e-3)
    assert np.abs(plain.coef_).max() > 0.5


@pytest.mark.parametrize("estimator", [BilevelRidge, BilevelLogisticRegression], **ids)
def test_a_shared_penalty_is_found_beside_a_feature_in_a_large_unit(estimator):
    X, y = table()
    goal = target_of(estimator, y)
    plain = estimator("shared", cv=3).fit(X, goal).score(X, goal)
    assert estimator("shared", cv=3).fit(X * [1, 1, 1, 1, 1e5], goal).score(X * [1, 1, 1, 1, 1e5], goal) > plain - 0.05


def test_newtons_method_ends_at_the_minimiser_beside_a_feature_in_a_large_unit():
    X, y = table()
    goal = (y > 0).astype(int)
    model = BilevelLogisticRegression("shared", cv=3).fit(X * [1, 1, 1, 1, 1e8], goal)
    # The derivative with respect to the intercept.
    assert model.predict_proba(X * [1, 1, 1, 1, 1e8])[:, 1].sum() == pytest.approx(goal.sum(), rel=1e-6)


def test_without_an_intercept_a_feature_far_from_zero_leaves_the_others_alone():
    X, y = table()
    X[:, 4] += 1e5
    model = BilevelRidge(fit_intercept=False, cv=3).fit(X, y)
    assert model.score(X, y) > 0.9 * Ridge(1.0, fit_intercept=False).fit(X, y).score(X, y)


@pytest.mark.parametrize("estimator", ALL, **ids)
@pytest.mark.parametrize("intercept", [True, False])
def test_arrays_that_run_backwards_or_cannot_be_written(estimator, intercept):
    X, y = table()
    goal = target_of(estimator, y)
    folds = [(np.arange(60) % 3 != k, np.arange(60) % 3 == k) for k in range(3)]
    settings = {"cv": folds, "fit_intercept": intercept, "max_iter": 5}
    usual = estimator("shared", **settings).fit(X, goal)
    backwards = X[::-1].copy()[::-1]
    locked = X.copy()
    locked.setflags(write=False)
    for other in (backwards, locked, np.asfortranarray(X)):
        np.testing.assert_allclose(estimator("shared", **settings).fit(other, goal).coef_, usual.coef_, rtol=1e-6)


@pytest.mark.parametrize("kind", [np.asarray, sparse.csr_matrix])
@pytest.mark.parametrize("estimator", [BilevelRidge, BilevelElasticNet, BilevelLogisticRegression])
def test_numbers_whose_squares_leave_double_precision_are_refused(estimator, kind):
    """A column of about 1e-170 counted as constant, and its coefficient was 0."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 3))
    y = (X[:, 0] > 0).astype(float)
    # Constant columns and rows without weight may hold any numbers.
    X = np.c_[X, np.zeros(40), np.r_[1e-170, np.zeros(39)]]
    estimator("shared").fit(kind(X), y, sample_weight=np.r_[0, np.ones(39)])
    for size, word in ((1e-170, "small"), (1e170, "large")):
        with pytest.raises(BilevelError, match=f"column 0 of X are too {word}.*StandardScaler"):
            estimator("shared").fit(kind(X * [size, 1, 1, 1, 0]), y)
        if estimator is not BilevelLogisticRegression:
            with pytest.raises(BilevelError, match="targets are up to"):
                estimator("shared").fit(kind(X * [1, 1, 1, 1, 0]), y * size)


def test_tensors_in_bfloat16():
    X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    y = X.float().sum(1)
    expected = BilevelRidge("shared").fit(X.float().numpy(), y.numpy())
    assert (BilevelRidge("shared").fit(X, y).coef_ == expected.coef_).all()
