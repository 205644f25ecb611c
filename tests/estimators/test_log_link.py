"""Counts and positive targets, compared with scikit-learn's regressors at the same penalty."""

import numpy as np
import pytest
from sklearn.linear_model import GammaRegressor, PoissonRegressor
from sklearn.metrics import d2_tweedie_score
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score
from sklearn.utils.estimator_checks import parametrize_with_checks

from bilevel.errors import BilevelError
from bilevel.estimators import BilevelGammaRegressor, BilevelPoissonRegressor

PAIRS = [(BilevelPoissonRegressor, PoissonRegressor), (BilevelGammaRegressor, GammaRegressor)]


@parametrize_with_checks(
    [BilevelPoissonRegressor(max_iter=3, tether=1.0, cv=3), BilevelGammaRegressor("shared", max_iter=5, cv=3)]
)
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


def table(estimator, rows=120, features=12, level=3.0, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows + 2000, features))
    mean = np.exp(level + 0.5 * X[:, 0] - 0.3 * X[:, 1])
    y = rng.poisson(mean) if estimator is BilevelPoissonRegressor else mean * rng.gamma(4.0, 0.25, size=len(mean))
    return X[:rows], y[:rows], X[rows:], y[rows:]


@pytest.mark.parametrize(("estimator", "rival"), PAIRS)
@pytest.mark.parametrize("intercept", [True, False])
def test_with_one_penalty_it_is_scikit_learns(estimator, rival, intercept):
    X, y, X_test, y_test = table(estimator, level=3.0 if intercept else 0.0)
    weight = np.random.default_rng(1).integers(1, 3, size=len(y)).astype(float)
    model = estimator("shared", fit_intercept=intercept).fit(X, y, sample_weight=weight)
    same = rival(alpha=model.alpha_, fit_intercept=intercept, tol=1e-10, max_iter=1000, solver="newton-cholesky")
    same.fit(X, y, sample_weight=weight)
    np.testing.assert_allclose(model.coef_, same.coef_, atol=1e-6)
    assert model.intercept_ == pytest.approx(same.intercept_, abs=1e-6)
    np.testing.assert_allclose(model.predict(X_test), same.predict(X_test), rtol=1e-5)
    assert model.score(X_test, y_test) == pytest.approx(same.score(X_test, y_test), rel=1e-5)
    weights = {"sample_weight": np.arange(len(y_test))}
    assert model.score(X_test, y_test, **weights) == pytest.approx(same.score(X_test, y_test, **weights), rel=1e-5)


@pytest.mark.parametrize(("estimator", "rival"), PAIRS)
def test_the_penalty_is_the_one_that_a_fine_grid_finds(estimator, rival):
    X, y, *_ = table(estimator, features=30, rows=60)
    cv, name = KFold(5), {BilevelPoissonRegressor: "poisson", BilevelGammaRegressor: "gamma"}[estimator]
    model = estimator("shared", cv=cv, tol=1e-9).fit(X, y)
    grid = {"alpha": np.logspace(-3, 2, 31)}
    settings = {"solver": "newton-cholesky", "tol": 1e-8}
    search = GridSearchCV(rival(**settings), grid, cv=cv, scoring=f"neg_mean_{name}_deviance").fit(X, y)
    assert np.log(model.alpha_ / search.best_params_["alpha"]) == pytest.approx(0, abs=0.25)
    deviances = cross_val_score(rival(alpha=model.alpha_, **settings), X, y, cv=cv, scoring=search.scoring)
    # The criterion is half the deviance. For counts it is in units of their mean.
    unit = y.mean() if estimator is BilevelPoissonRegressor else 1.0
    assert 2 * unit * model.history_["value"].min() == pytest.approx(-deviances.mean(), rel=1e-4)
    scored = estimator("shared", cv=cv, scoring=search.scoring, warm_start=True).fit(X, y)
    np.testing.assert_allclose(scored.cv_score_.mean(), deviances.mean(), rtol=1e-3)
    before = scored.alpha_
    assert np.log(scored.fit(X, y).alpha_ / before) == pytest.approx(0, abs=0.02)


@pytest.mark.parametrize("estimator", [estimator for estimator, _ in PAIRS])
def test_a_penalty_for_every_feature_pays_where_few_matter(estimator):
    X, y, X_test, y_test = table(estimator, rows=60, features=30)
    each, one = estimator().fit(X, y), estimator("shared").fit(X, y)
    assert each.score(X_test, y_test) > one.score(X_test, y_test)
    assert np.median(each.alpha_[2:]) > 5 * each.alpha_[:2].max()
    assert each.certificate_.applies and each.certificate_.value_gap < 1e-6 * each.certificate_.value
    wide = estimator(tether=1.0).fit(X[:25], y[:25])
    assert "span of the 25 rows" in wide.method_ and np.isfinite(wide.coef_).all()


def test_the_unit_of_the_target_changes_the_intercept_alone():
    X, y, *_ = table(BilevelGammaRegressor)
    one, other = (BilevelGammaRegressor("shared").fit(X, factor * y) for factor in (1.0, 1e6))
    assert one.alpha_ == pytest.approx(other.alpha_, rel=1e-6)
    assert other.intercept_ - one.intercept_ == pytest.approx(np.log(1e6))
    X, y, *_ = table(BilevelPoissonRegressor)
    one, other = (BilevelPoissonRegressor("shared").fit(X, factor * y) for factor in (1.0, 1e6))
    np.testing.assert_allclose(one.coef_, other.coef_, rtol=1e-6)


def test_scores_are_d2_and_may_be_others():
    X, y, X_test, y_test = table(BilevelPoissonRegressor)
    model = BilevelPoissonRegressor("shared").fit(X, y)
    assert model.score(X_test, y_test) == pytest.approx(d2_tweedie_score(y_test, model.predict(X_test), power=1))
    other = BilevelPoissonRegressor("shared", scoring="neg_mean_absolute_error").fit(X, y)
    assert other.score(X_test, y_test) == pytest.approx(-np.abs(y_test - other.predict(X_test)).mean())


def test_targets_that_cannot_work_say_why():
    X, y, *_ = table(BilevelPoissonRegressor)
    with pytest.raises(BilevelError, match="counts cannot be negative"):
        BilevelPoissonRegressor().fit(X, y - 100)
    with pytest.raises(BilevelError, match="only positive numbers"):
        BilevelGammaRegressor().fit(X, np.arange(120))
    with pytest.raises(BilevelError, match="are zero"):
        BilevelPoissonRegressor().fit(X, 0 * y)
    with pytest.raises(BilevelError, match="Fold 0 of cv has only targets of 0 to train on"):
        late = (np.arange(120) >= 60).astype(float)
        BilevelPoissonRegressor(cv=[(np.arange(60), np.arange(60, 120))]).fit(X, late)
