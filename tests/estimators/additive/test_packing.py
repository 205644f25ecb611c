"""A fitted additive model as JSON data, and back."""

import json
from functools import partial

import numpy as np
import pandas as pd
import pytest

from bilevel.estimators import BilevelAdditiveClassifier, BilevelAdditiveRegressor
from bilevel.estimators.additive.packing import packed_additive, unpacked_additive


def table(rows=120):
    draw = np.random.default_rng(0)
    X = pd.DataFrame({"a": draw.normal(size=rows), "b": draw.uniform(size=rows), "k": draw.choice(list("xyz"), rows)})
    y = np.sin(2 * X["a"]) * X["b"] + (X["k"] == "x") + 0.1 * draw.normal(size=rows)
    X.loc[::9, "a"] = np.nan
    return X.assign(c=1.0), y.to_numpy()


def wide(rows=40, columns=70):
    """Slopes that share a penalty are rotated to the span of the rows."""
    draw = np.random.default_rng(1)
    X = pd.DataFrame(draw.normal(size=(rows, columns)), columns=[f"gene{i}" for i in range(columns)])
    return X, X["gene0"].to_numpy() + 0.1 * draw.normal(size=rows)


def classes(count):
    X, y = table()
    return X, np.where(y > 0.3, "high", "low") if count == 2 else np.digitize(y, [0, 1])


MODELS = {
    "pairs": (table, BilevelAdditiveRegressor(max_iter=5)),
    "monotone": (table, BilevelAdditiveRegressor(monotone={"b": 1}, pairs=0, tether=np.inf, max_iter=5)),
    "two classes": (partial(classes, 2), BilevelAdditiveClassifier(pairs=[("a", "b")], max_iter=5)),
    "three classes": (partial(classes, 3), BilevelAdditiveClassifier(max_iter=5)),
    "wide": (wide, BilevelAdditiveRegressor(max_iter=5)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_was_written_as_json_and_arrays_does_all_that_it_did(name):
    data, model = MODELS[name]
    X, y = data()
    model.fit(X, y)
    facts, arrays = packed_additive(model)
    back = unpacked_additive(json.loads(json.dumps(facts, allow_nan=False)), arrays)
    assert type(back) is type(model) and back.get_params() == model.get_params()
    if hasattr(model, "predict_proba"):
        assert np.array_equal(back.predict_proba(X), model.predict_proba(X))
        assert np.array_equal(back.predict(X), model.predict(X))
    else:
        assert np.array_equal(back.predict_interval(X), model.predict_interval(X))
    assert repr(back.explain(X.iloc[[3]])) == repr(model.explain(X.iloc[[3]]))
    for term in model.terms_[:8]:
        mine, own = back.effect(term), model.effect(term)
        assert np.array_equal(mine.mean, own.mean) and np.array_equal(mine.deviation, own.deviation)
    assert back.outcome_ == model.outcome_ and back.outcome_.kind == model.outcome_.kind
    assert len(back.plot().axes) >= 1


def test_the_training_rows_are_not_stored():
    X, y = table()
    facts, arrays = packed_additive(BilevelAdditiveRegressor(max_iter=2, pairs=0).fit(X, y))
    rows = [name for name, array in arrays.items() if len(X) in array.shape]
    # Sorted: no longer in the order of the rows.
    assert rows == ["_errors", "_coverages"] and np.all(np.diff(arrays["_errors"]) >= 0)
    assert json.dumps(facts).count("0.5") < len(X)


def test_only_known_classes_are_made():
    X, y = table()
    facts, arrays = packed_additive(BilevelAdditiveRegressor(max_iter=2, pairs=0).fit(X, y))
    facts["state"]["_design"]["class"] = "Popen"
    with pytest.raises(KeyError):
        unpacked_additive(facts, arrays)
    facts["state"]["_design"] = {"code": "print(1)"}
    with pytest.raises(ValueError, match="unknown keys"):
        unpacked_additive(facts, arrays)
    draw = BilevelAdditiveRegressor(random_state=np.random.RandomState(0), max_iter=2, pairs=0).fit(X, y)
    with pytest.raises(TypeError, match="settings"):
        packed_additive(draw)
