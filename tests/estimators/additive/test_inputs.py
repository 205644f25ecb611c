"""What additive models read from lists, arrays of text and objects, and arguments that name columns."""

import datetime
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
from sklearn.model_selection import TimeSeriesSplit

from bilevel.errors import BilevelError
from bilevel.estimators import BilevelAdditiveClassifier, BilevelAdditiveRegressor
from bilevel.estimators.additive import base

QUICK = {"pairs": 0, "max_iter": 3}


def table(rows=60):
    rng = np.random.default_rng(0)
    age, kind = rng.uniform(20, 80, rows).round(3), rng.choice(["a", "b", "c"], rows)
    return age, kind, age / 20 + (kind == "a")


def test_numbers_beside_text_stay_numbers():
    age, kind, y = table()
    frame = pd.DataFrame({"x0": age, "x1": kind})
    expected = BilevelAdditiveRegressor(**QUICK).fit(frame, y)
    as_list = [[float(number), str(word)] for number, word in zip(age, kind, strict=True)]
    model = BilevelAdditiveRegressor(**QUICK).fit(as_list, y)
    assert model.penalties_ == expected.penalties_
    np.testing.assert_array_equal(model.predict(as_list[:5]), expected.predict(frame[:5]))
    as_text = np.array(as_list)
    with pytest.raises(BilevelError, match="array of text, and column 'x0' holds numbers as text"):
        BilevelAdditiveRegressor(**QUICK).fit(as_text, y)
    named = BilevelAdditiveRegressor(categorical=[0], **QUICK).fit(as_text, y)
    assert set(named.penalties_["x0"]) == {"category"}


def test_decimals_are_numbers_and_dates_are_refused():
    age, kind, y = table()
    frame = pd.DataFrame({"age": age, "kind": kind})
    exact = frame.assign(age=[Decimal(str(number)) for number in age])
    predicted = BilevelAdditiveRegressor(**QUICK).fit(exact, y).predict(exact)
    np.testing.assert_allclose(predicted, BilevelAdditiveRegressor(**QUICK).fit(frame, y).predict(frame))
    days = [datetime.date(2024, 1, 1) + datetime.timedelta(days=day) for day in range(60)]
    with pytest.raises(BilevelError, match="holds dates"):
        BilevelAdditiveRegressor(**QUICK).fit(frame.assign(day=days), y)


def test_a_number_that_is_a_name_and_a_position_is_refused():
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(60, 4))).drop(columns=0)
    y = 3 * frame[2] - np.tanh(frame[1])
    with pytest.raises(BilevelError, match=r"one column and the position of another\. Pass the name as text, '1'"):
        BilevelAdditiveRegressor(monotone={1: -1}, **QUICK).fit(frame, y)
    model = BilevelAdditiveRegressor(monotone={"1": -1}, **QUICK).fit(frame, y)
    assert model._signs == {0: -1}


@pytest.mark.parametrize("pairs", [[("a", "b"), ("b", "a")], [("a", "a")]])
def test_pairs_that_are_there_twice_are_refused(pairs):
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(60, 2)), columns=["a", "b"])
    with pytest.raises(BilevelError, match="a column with itself or a pair that is there twice"):
        BilevelAdditiveRegressor(pairs=pairs).fit(frame, frame["a"])


def test_folds_without_training_rows_of_a_class_are_refused():
    X, y = np.random.default_rng(0).normal(size=(60, 2)), np.repeat(["a", "b", "c"], 20)
    with pytest.raises(BilevelError, match="Fold 0 of cv is evaluated on class 'b' but has no row of it"):
        BilevelAdditiveClassifier(cv=TimeSeriesSplit(3), **QUICK).fit(X, y)
    with pytest.raises(BilevelError, match="is evaluated on class 'rare'"):
        BilevelAdditiveClassifier(**QUICK).fit(X, np.where(y == "a", "rare", np.tile(["b", "c"], 30)), groups=y)


def test_a_rare_class_is_among_the_rows_that_tune_the_penalties(monkeypatch):
    monkeypatch.setattr(base, "TUNING_ROWS", 100)
    rng = np.random.default_rng(0)
    X = rng.normal(size=(3000, 2))
    y = np.zeros(3000, dtype=int)
    y[np.argsort(-X[:, 0] - 0.3 * rng.normal(size=3000))[:25]] = 1
    for seed in range(3):
        model = BilevelAdditiveClassifier(random_state=seed, pairs=0).fit(X, y)
        assert model.predict_proba(X)[y == 1, 1].mean() > 0.3
        assert f"of {100 + 20 - y[np.random.RandomState(seed).permutation(3000)[:100]].sum()} rows" in model.method_
