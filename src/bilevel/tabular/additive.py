"""The additive model of a table: its pipeline, notes about fields, and its content as JSON data and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from sklearn.pipeline import Pipeline

from bilevel import extras
from bilevel.estimators.additive.packing import packed_additive, unpacked_additive
from bilevel.estimators.additive.terms import CategoryTerm
from bilevel.tabular.columns import column_reader
from bilevel.tabular.formatting import counted, listed
from bilevel.tabular.values import labels_of


def additive_pipeline(kinds: Mapping[str, Any], gaps: bool, estimator: Any) -> Pipeline:
    """The steps `columns`, which reads numbers, categories and dates, and `model`."""
    return Pipeline([("columns", column_reader(kinds, gaps)), ("model", estimator)])


def columns_read(pipeline: Pipeline) -> dict[str, Any]:
    """The columns of the table and how each is read."""
    return dict(pipeline["columns"].kw_args["kinds"])


def additive_notes(pipeline: Pipeline, frame: Any, where: str) -> list[str]:
    """A note for every column with empty fields, or with categories that the training rows do not have."""
    model, notes = pipeline["model"], []
    terms = dict(zip(model.feature_names_in_, model._design.terms, strict=True))
    for name, kind in columns_read(pipeline).items():
        column = frame[name]
        # A date column has several terms, such as "day (month)". The first is enough: all have the same empty fields.
        term = terms.get(name, next((terms[key] for key in terms if key.startswith(f"{name} (")), None))
        if empty := int(column.isna().sum()):
            known = "(missing)" in term.levels if isinstance(term, CategoryTerm) else bool(getattr(term, "gap", 0))
            effect = "the effect that a missing value had in the training rows" if known else "no effect"
            notes.append(f"Column {name!r}: {counted(empty, 'empty field')} of {where}, with {effect}.")
        if kind == "categories" and isinstance(term, CategoryTerm):
            notes += unknown_categories(column, term.levels.tolist(), "it has no effect there", where)
    return notes


def unknown_categories(column: Any, known: list[str], consequence: str, where: str) -> list[str]:
    """A note about the values of a column that the training rows do not have, if there are any."""
    old = set(known)
    new = [label for label in labels_of(column) if isinstance(label, str) and label not in old]
    if not new:
        return []
    return [
        f"Column {column.name!r}: {counted(len(new), 'row')} of {where} {'has' if len(new) == 1 else 'have'} a value "
        f"that the training rows lack, such as {new[0]!r}; {consequence}. Known are {listed(known)}."
    ]


def additive_content(pipeline: Pipeline) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The content of the pipeline for a file: JSON data and tensors."""
    reading = pipeline["columns"].kw_args
    facts, arrays = packed_additive(pipeline["model"])
    tensors = {name: torch.tensor(array, dtype=torch.float64) for name, array in arrays.items()}
    return {
        "reading": {"kinds": [list(pair) for pair in reading["kinds"].items()], "gaps": reading["gaps"]},
        **facts,
    }, tensors


def additive_from(content: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Pipeline:
    """The fitted pipeline. Damaged content raises KeyError, TypeError or ValueError."""
    pandas = extras.load("pandas", extra="table", purpose="A model of a table")
    estimator = unpacked_additive(content, {name: tensor.numpy() for name, tensor in tensors.items()})
    kinds = {str(name): str(kind) for name, kind in content["reading"]["kinds"]}
    pipeline = additive_pipeline(kinds, bool(content["reading"]["gaps"]), estimator)
    # Predict one row, with unknown categories and every number in the middle of its range. This fails if the parts of
    # the file do not fit each other.
    middle = [
        "?" if isinstance(term, CategoryTerm) else 0.5 * (term.range[0] + term.range[1])
        for term in estimator._design.terms
    ]
    with np.errstate(invalid="ignore"):
        scores = estimator._scores(pandas.DataFrame([middle], columns=list(estimator.feature_names_in_)))
    if not np.isfinite(scores).all():
        raise ValueError("its predictions are not finite")
    return pipeline
