"""Additive models that are tuned on folds: groups of rows, splitters, scores of held-out rows."""

import numpy as np
import pytest
from sklearn.linear_model import Ridge
from sklearn.metrics import r2_score
from sklearn.model_selection import GroupKFold, TimeSeriesSplit

from bilevel.errors import BilevelError
from bilevel.estimators import BilevelAdditiveClassifier, BilevelAdditiveRegressor

from test_additive import curved  # isort: skip


def households(groups=12, members=20, seed=0):
    """Rows of a group share a place and an error, so that a curve over the place can predict the error."""
    rng = np.random.default_rng(seed)
    place, error = rng.uniform(-2, 2, groups), rng.normal(size=groups)
    group = np.repeat(np.arange(groups), members)
    own = rng.uniform(-2, 2, len(group))
    y = own + error[group] + 0.1 * rng.normal(size=len(group))
    return np.column_stack([place[group], own]), y, group


def test_groups_keep_the_errors_of_a_group_out_of_the_effects():
    X, y, group = households()
    X_new, y_new, _ = households(400, 1, seed=1)
    alone = BilevelAdditiveRegressor().fit(X, y)
    together = BilevelAdditiveRegressor().fit(X, y, groups=group)
    assert alone.importance_["x0"] > 0.5  # single rows that are left out do not show that this effect is noise
    assert together.importance_["x0"] < 0.2
    assert together.score(X_new, y_new) > alone.score(X_new, y_new) + 0.1
    assert "5 folds" in together.method_


def test_intervals_of_grouped_rows_cover_new_groups():
    X, y, group = households(60, 6)
    X_new, y_new, _ = households(1000, 1, seed=2)
    ends = BilevelAdditiveRegressor().fit(X, y, groups=group).predict_interval(X_new, 0.9)
    assert 0.85 < np.mean((ends[:, 0] < y_new) & (y_new < ends[:, 1])) < 0.97


def test_the_criterion_is_the_mean_loss_of_fits_to_the_other_folds():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 3))
    y = X @ [1.0, -1.0, 0.0] + rng.normal(size=60)
    folds = list(GroupKFold(4).split(X, y, np.arange(60) % 7))
    model = BilevelAdditiveRegressor(cv=folds, pairs=0).fit(X, y)
    rows = model._reduction.rotated(model._features(X))
    alpha = np.concatenate(
        [
            np.full(piece.where.stop - piece.where.start, model.penalties_[model.terms_[piece.term]][piece.kind])
            for piece in model._reduction.pieces
        ]
    )
    loss = 0.0
    for train, test in folds:
        fit = Ridge(alpha=1.0).fit(rows[train] / np.sqrt(alpha), y[train])
        loss += 0.5 * ((y[test] - fit.predict(rows[test] / np.sqrt(alpha))) ** 2).sum() / len(y)
    assert model.criterion_ == pytest.approx(loss, rel=1e-9)


@pytest.mark.parametrize("kind", [BilevelAdditiveRegressor, BilevelAdditiveClassifier])
def test_every_fold_has_a_score(kind):
    X, y = curved(150)
    y = y if kind is BilevelAdditiveRegressor else np.digitize(y, [-0.5, 0.5])
    model = kind(cv=3, scoring="r2" if kind is BilevelAdditiveRegressor else "balanced_accuracy").fit(X, y)
    assert model.cv_score_.shape == (3,)
    assert 0.6 < model.cv_score_.mean() < model.score(X, y)


def test_scores_without_folds_are_of_rows_that_were_left_out():
    X, y = curved(80)
    model = BilevelAdditiveRegressor(scoring="r2", tether=np.inf, pairs=0).fit(X, y)
    left_out = []
    rows = model._reduction.rotated(model._features(X))
    alpha = model._penalty_of_feature
    for i in range(len(y)):
        others = np.arange(len(y)) != i
        fit = Ridge(alpha=1.0).fit(rows[others] / np.sqrt(alpha), y[others])
        left_out.append(fit.predict(rows[[i]] / np.sqrt(alpha))[0])
    assert model.cv_score_ == pytest.approx([r2_score(y, left_out)], rel=1e-8)


def test_time_series_are_tuned_on_later_rows():
    X, y = curved(200)
    model = BilevelAdditiveRegressor(cv=TimeSeriesSplit(4), scoring="r2").fit(X, y)
    assert model.cv_score_.shape == (4,) and model.cv_score_[-1] > 0.7
    assert model.predict_interval(X[:3]).shape == (3, 2)


def test_large_tables_are_tuned_on_a_part_of_the_folds():
    X, y = curved(2600)
    group = np.arange(2600) % 50
    model = BilevelAdditiveRegressor(pairs=0, scoring="r2").fit(X, y, groups=group)
    assert len(model.cv_score_) == 5 and "2000 rows" in model.method_


def test_rows_of_weight_zero_stay_where_they_are_in_the_folds():
    X, y = curved(120)
    weight = np.where(np.arange(120) % 4 == 0, 0.0, 1.0)
    group = np.arange(120) // 6
    folds = list(GroupKFold(4).split(X, y, group))
    one = BilevelAdditiveRegressor(cv=folds).fit(X, y, weight)
    position = np.cumsum(weight > 0) - 1
    kept = [tuple(position[rows[weight[rows] > 0]] for rows in pair) for pair in folds]
    two = BilevelAdditiveRegressor(cv=kept).fit(X[weight > 0], y[weight > 0])
    np.testing.assert_allclose(one.predict(X), two.predict(X), rtol=1e-8)


def test_the_number_of_threads_does_not_change_the_fit():
    X, y = curved(100)
    one, two = (BilevelAdditiveRegressor(n_jobs=jobs).fit(X, y).predict(X) for jobs in (1, 2))
    np.testing.assert_allclose(one, two, rtol=1e-9)


def test_groups_of_another_length_and_folds_without_rows_are_refused():
    X, y = curved(50)
    with pytest.raises(ValueError, match="inconsistent"):
        BilevelAdditiveRegressor().fit(X, y, groups=[1, 2])
    with pytest.raises(BilevelError, match="leaves no rows"):
        BilevelAdditiveRegressor(cv=1).fit(X, y)
