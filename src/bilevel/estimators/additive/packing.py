"""A fitted additive model as JSON data and arrays, for a file, and back. No code is stored, and none is run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from bilevel.errors import Outcome
from bilevel.estimators.additive.classifier import BilevelAdditiveClassifier
from bilevel.estimators.additive.design import Design, Piece
from bilevel.estimators.additive.effects import AdditiveEffects
from bilevel.estimators.additive.reduction import Reduction
from bilevel.estimators.additive.regressor import BilevelAdditiveRegressor
from bilevel.estimators.additive.terms import CategoryTerm, Curve, NumericTerm, PairTerm, Part
from bilevel.estimators.folds import Array

MODELS: dict[str, type[AdditiveEffects]] = {
    "classifier": BilevelAdditiveClassifier,
    "regressor": BilevelAdditiveRegressor,
}
# The classes that may be in a file, and the attributes of each that are stored if an object has them.
STORED: dict[Any, tuple[str, ...]] = {
    Part: ("kind", "size"),
    Piece: ("term", "kind", "where", "penalty"),
    Curve: ("knots", "coefficients"),
    NumericTerm: ("gap", "range", "curve", "mean", "slope", "parts", "varies", "middle", "scale", "centre", "unit"),
    CategoryTerm: ("levels", "share", "unit", "two", "parts"),
    PairTerm: ("first", "second", "curved", "shadow", "split", "unit", "parts"),
    Design: ("one_slope", "terms", "pairs"),
    Reduction: ("mean", "rotation", "columns", "others", "pieces", "size"),
}
CLASSES = {kind.__name__: kind for kind in STORED}
FITTED = (
    "n_features_in_", "feature_names_in_", "classes_", "intercept_", "terms_", "penalties_", "importance_",
    "criterion_", "cv_score_", "history_", "n_iter_", "method_", "outcome_", "degrees_of_freedom_",
    "_names", "_signs", "_design", "_reduction", "_coef", "_inverse", "_inverses", "_errors", "_coverages", "_own",
    "_deviation", "_points_are_residuals",
)  # fmt: skip


def packed_additive(model: AdditiveEffects) -> tuple[dict[str, Any], dict[str, Array]]:
    """Data for JSON, and numeric arrays. Training rows are not stored, so plots of the loaded model show none."""
    kind = next(name for name, one in MODELS.items() if type(model) is one)
    arrays: dict[str, Array] = {}
    state = {name: _plain(getattr(model, name), name, arrays) for name in FITTED if hasattr(model, name)}
    return {"model": kind, "settings": _plain(model.get_params(), "settings", arrays), "state": state}, arrays


def unpacked_additive(facts: Mapping[str, Any], arrays: Mapping[str, Array]) -> AdditiveEffects:
    """The fitted model. An incomplete file raises KeyError, TypeError or ValueError."""
    model = MODELS[facts["model"]](**_object(facts["settings"], arrays))
    for name in FITTED:
        if name in facts["state"]:
            setattr(model, name, _object(facts["state"][name], arrays))
    model._pieces = model._design.pieces()
    model._training_columns = [None] * len(model._design.terms)
    model._residuals = np.zeros((0, len(model._coef)))
    return model


def _plain(value: Any, name: str, arrays: dict[str, Array]) -> Any:
    """`value` as JSON data. Numeric arrays are moved to `arrays`, under their name."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "OU":
            return {"texts": value.tolist(), "objects": value.dtype.kind == "O"}
        arrays[name] = value
        return {"array": name, "whole": value.dtype.kind in "iu"}
    if isinstance(value, Outcome):
        return {"outcome": [value.kind, str(value)]}
    if type(value) in STORED:
        state = {
            key: _plain(getattr(value, key), f"{name}.{key}", arrays)
            for key in STORED[type(value)]
            if hasattr(value, key)
        }
        return {"class": type(value).__name__, "state": state}
    if isinstance(value, Mapping):
        pairs = [[key, _plain(one, f"{name}.{place}", arrays)] for place, (key, one) in enumerate(value.items())]
        return {"pairs": pairs}
    if isinstance(value, (list, tuple)):
        items = [_plain(one, f"{name}.{place}", arrays) for place, one in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, slice):
        return {"slice": [value.start, value.stop]}
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise TypeError(f"{name} is {value!r}, which cannot be stored in a model file")
    return value


def _object(value: Any, arrays: Mapping[str, Array]) -> Any:
    """The inverse of `_plain`."""
    if isinstance(value, list):
        return [_object(one, arrays) for one in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"array": name, "whole": is_integer}:
            return arrays[name].astype(int) if is_integer else arrays[name]
        case {"texts": texts, "objects": objects}:
            return np.array(texts, dtype=object if objects else str)
        case {"outcome": [kind, sentence]}:
            return Outcome(kind, sentence)
        case {"class": name, "state": state}:
            stored = CLASSES[name]
            made = stored.__new__(stored)
            for key in STORED[stored]:
                if key in state:
                    object.__setattr__(made, key, _object(state[key], arrays))
            return made
        case {"pairs": pairs}:
            return {key: _object(one, arrays) for key, one in pairs}
        case {"tuple": items}:
            return tuple(_object(item, arrays) for item in items)
        case {"slice": [start, stop]}:
            return slice(start, stop)
        case {"float": text}:
            return float(text)
    raise ValueError(f"it holds an entry with the unknown keys {sorted(value)}")
