"""The additive estimators through scikit-learn's interface."""

import numpy as np
import pandas as pd
import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from bilevel.errors import BilevelError, BilevelWarning
from bilevel.estimators import BilevelAdditiveClassifier, BilevelAdditiveRegressor
from bilevel.estimators.additive import base

# A row of weight 2 is left out completely. Of two equal rows, only one is left out.
DIFFERENT = {"check_sample_weight_equivalence_on_dense_data": "leave-one-out leaves out whole rows"}


@parametrize_with_checks(
    [BilevelAdditiveRegressor(max_iter=3), BilevelAdditiveClassifier(max_iter=3)],
    expected_failed_checks=lambda estimator: DIFFERENT,
)
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


def curved(rows=200, seed=0):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "a": rng.uniform(-2, 2, rows),
            "b": rng.normal(size=rows),
            "group": rng.choice(["one", "two", "three"], rows),
            "noise": rng.normal(size=rows),
        }
    )
    effect = frame["group"].map({"one": 0.0, "two": 1.0, "three": -1.0})
    y = np.sin(2 * frame["a"]) + 0.5 * frame["b"] + effect + 0.2 * rng.normal(size=rows)
    frame.loc[rng.uniform(size=rows) < 0.1, "b"] = np.nan
    return frame, y.to_numpy()


def test_a_table_with_curves_categories_and_missing_values():
    X, y = curved()
    X_new, y_new = curved(1000, seed=1)
    model = BilevelAdditiveRegressor().fit(X, y)
    assert model.score(X_new, y_new) > 0.85
    assert set(model.penalties_["b"]) == {"linear", "curve", "missing"}
    assert model.importance_["noise"] < 0.1 * model.importance_["a"]


@pytest.mark.parametrize(("fitted", "given"), [("bool", "int"), ("text", "int"), ("int", "bool")])
def test_categories_in_another_coding_are_refused(fitted, given):
    number = np.arange(60) % 2
    kinds = {"bool": number == 1, "int": number, "text": np.where(number, "yes", "no")}
    frame = pd.DataFrame({"kind": kinds[fitted], "x": np.random.default_rng(0).normal(size=60)})
    model = BilevelAdditiveRegressor(categorical=["kind"]).fit(frame, 3 * number + frame["x"])
    assert model.score(frame, 3 * number + frame["x"]) > 0.99
    with pytest.raises(BilevelError, match=r"'kind' held categories such as .* Pass the column as it was in training"):
        model.predict(frame.assign(kind=kinds[given]))
    # A missing value is a category, and a new one has no effect.
    model.predict(frame.assign(kind=np.nan)), model.predict(frame.assign(kind="new"))


@pytest.mark.parametrize("fitted", [np.float64, np.float32])
def test_categories_in_single_precision_are_those_in_double_precision(fitted):
    kind = np.repeat([0.1, 0.7, 1e-9, 2.0], 15)
    X = np.column_stack([kind, np.random.default_rng(0).normal(size=60)])
    y = np.repeat([3.0, 0.0, -3.0, 1.0], 15) + X[:, 1]
    model = BilevelAdditiveRegressor(categorical=[0]).fit(X.astype(fitted), y)
    for given in (np.float64, np.float32):
        np.testing.assert_allclose(model.predict(X.astype(given)), y, atol=0.1)
    if fitted == np.float64:
        # A neighbour in double precision is a new category, without effect.
        assert np.abs(model.predict(np.nextafter(X, 9)) - y)[:15].min() > 1


def test_numbers_of_a_categorical_column_are_categories():
    kind = np.tile([1, 2, 3], 20)
    frame = pd.DataFrame({"kind": pd.Categorical(kind), "x": np.random.default_rng(0).normal(size=60)})
    model = BilevelAdditiveRegressor().fit(frame, (kind == 2) + frame["x"])
    assert set(model.penalties_["kind"]) == {"category"}
    np.testing.assert_allclose(model.predict(frame), model.predict(frame.assign(kind=kind)))


def test_rows_of_weight_zero_are_as_if_they_were_not_there():
    X, y = curved(120)
    weight = np.where(np.arange(120) % 4 == 0, 0.0, 1.0)
    one = BilevelAdditiveRegressor().fit(X, y, weight)
    two = BilevelAdditiveRegressor().fit(X[weight > 0], y[weight > 0])
    np.testing.assert_allclose(one.predict(X), two.predict(X), rtol=1e-8)


@pytest.mark.parametrize("slopes", [200, 100])
def test_more_columns_than_rows(slopes, monkeypatch):
    monkeypatch.setattr(base, "MAX_OWN_SLOPES", slopes)
    rng = np.random.default_rng(0)
    X = rng.normal(size=(360, 200))
    y = X[:, :5] @ [2, -1, 1, 1, -2] + 0.1 * rng.normal(size=360)
    model = BilevelAdditiveRegressor().fit(X[:60], y[:60])
    assert len({model.penalties_[f"x{j}"]["linear"] for j in range(200)}) == (200 if slopes == 200 else 1)
    # Five of 200 columns matter. One penalty for all of them explains almost nothing.
    assert (model.score(X[60:], y[60:]) > 0.5) == (slopes == 200)
    label = np.digitize(y[:60], [-2, 2])
    assert BilevelAdditiveClassifier().fit(X[:60], label).predict_proba(X).shape == (360, 3)


def test_the_inverse_hessian_of_few_rows_is_that_of_many():
    rng = np.random.default_rng(0)
    X, weight, alpha = rng.normal(size=(20, 50)), rng.uniform(0.5, 2, 20), rng.uniform(0.1, 9, 50)
    inverse = np.linalg.inv(X.T @ (weight[:, None] * X) + np.diag(alpha))
    np.testing.assert_allclose(base.inverse_hessian(X, weight, alpha), inverse, rtol=1e-9, atol=1e-12)


def test_weights_of_classes_are_weights_of_their_rows():
    X, y = curved(120)
    rare = np.where(y > 1, "high", "low")
    model = BilevelAdditiveClassifier(class_weight={"high": 4, "low": 1}).fit(X, rare)
    by_row = BilevelAdditiveClassifier().fit(X, rare, np.where(rare == "high", 4.0, 1.0))
    np.testing.assert_array_equal(model.predict_proba(X), by_row.predict_proba(X))
    balanced = BilevelAdditiveClassifier(class_weight="balanced").fit(X, rare)
    assert (
        balanced.predict_proba(X)[:, 0].mean() > BilevelAdditiveClassifier().fit(X, rare).predict_proba(X)[:, 0].mean()
    )


def test_numbers_whose_squares_leave_double_precision_are_refused():
    frame, y = curved(60)[:2]
    model = BilevelAdditiveRegressor(pairs=0, max_iter=3)
    for size, word in ((1e-170, "small"), (1e170, "large")):
        with pytest.raises(BilevelError, match=f"column 'a' of X are too {word}"):
            model.fit(frame.assign(a=size * frame["a"]), y)
        with pytest.raises(BilevelError, match="targets are up to"):
            model.fit(frame, size * y)


def test_weights_that_count_rows_as_less_than_one_are_pointed_out():
    frame, y = curved(60)[:2]
    with pytest.warns(BilevelWarning, match="60 rows add up to 1.*Multiply the weights by 60 "):
        BilevelAdditiveRegressor(pairs=0, max_iter=3).fit(frame, y, sample_weight=np.full(60, 1 / 60))
