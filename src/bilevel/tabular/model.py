"""A tuned model of a table: a fitted scikit-learn pipeline, saved as tensors and JSON, never pickled."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import FunctionTransformer

from bilevel import extras
from bilevel.errors import BilevelError
from bilevel.tabular.additive import additive_content, additive_from, additive_notes, columns_read, unknown_categories
from bilevel.tabular.candidates import make_estimator
from bilevel.tabular.columns import described, outputs, preprocessing, quiet_categories
from bilevel.tabular.dates import DateOrder
from bilevel.tabular.formatting import counted, listed
from bilevel.tabular.settings import ModelKind
from bilevel.tabular.values import Floats, first_row
from bilevel.training.files import read_tensors, write_tensors

KIND, VERSION = "table model", 3
FILE = "model.safetensors"
# The attributes of the pipeline's steps that are saved as arrays.
LEARNED = [
    ("varying", "variances_"),
    *(("scale", name) for name in ("mean_", "var_", "scale_")),
    *(("model", name) for name in ("coef_", "intercept_", "alpha_")),
]


@dataclass(frozen=True)
class TablePredictions:
    """Predictions for the rows of a table, in their order.

    Args:
        values: numbers, or class names; None in rows with an empty field that the model cannot fill in.
        probabilities: rows × classes, for a model of classes; NaN where there is no prediction.
        notes: what was done with unusual fields, one sentence each.
    """

    values: list[Any]
    probabilities: Floats | None
    notes: list[str]


@dataclass(frozen=True)
class TableModel:
    """A fitted pipeline, with what is needed to save it and to predict.

    Args:
        pipeline: predicts from DataFrames as pandas reads them. Its last step is `model`, an estimator of
            `bilevel.estimators`. Before a linear model are the steps `columns` (a ColumnTransformer), `varying` and
            `scale`; before an additive model, `columns` (a FunctionTransformer that reads numbers, categories and
            dates).
        model: additive, ridge, elastic-net or logistic.
        target: the column that the model predicts.
        missing: the setting `missing` of the training.
        settings: arguments of `make_estimator`, for a linear model.
        facts: the file, its checksum, the number of rows and the column of weights.
    """

    pipeline: Pipeline
    model: ModelKind
    target: str
    missing: str = "error"
    settings: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def columns(self) -> list[str]:
        """The columns that the model reads."""
        if self.model == "additive":
            return list(columns_read(self.pipeline))
        return [one["name"] for one in described(self.pipeline["columns"])]

    @property
    def classes(self) -> list[str]:
        return list(getattr(self.pipeline[-1], "classes_", ()))

    @property
    def features(self) -> list[str]:
        return list(self.pipeline[:-1].get_feature_names_out())

    @property
    def coefficients(self) -> Floats:
        """The coefficients of a linear model's standardised features, outputs × features. Two classes have one."""
        return np.atleast_2d(self.pipeline[-1].coef_)

    @property
    def penalty(self) -> Floats:
        """The penalty of every standardised feature of a linear model."""
        return np.broadcast_to(self.pipeline[-1].alpha_, self.coefficients.shape[1])

    def outputs(self, frame: Any) -> Floats:
        """The predicted numbers, or probabilities of shape rows × classes."""
        with quiet_categories():
            return outputs(self.pipeline, frame)

    def predict(self, frame: Any, where: str = "the table") -> TablePredictions:
        """Predictions for a DataFrame.

        Args:
            frame: a table with the columns that the model was trained on. Others are ignored, with a note.
            where: the name of the table in messages.
        """
        self._check_columns(list(frame.columns), where)
        notes = field_notes(self.pipeline, frame, where)
        used = {*self.columns, self.target, self.facts.get("weights")}
        if extra := [name for name in frame.columns if name not in used]:
            notes.append(f"Columns of {where} that the model does not use: {listed(extra)}.")
        complete = np.ones(len(frame), dtype=bool)
        if self.missing == "drop":
            complete = frame[self.columns].notna().all(axis=1).to_numpy(dtype=bool)
        if not complete.all():
            notes.append(
                f"{int((~complete).sum())} of {len(complete)} rows have empty fields (first row "
                f"{first_row(frame, ~complete)}) and get no prediction: the model's training left such rows out."
            )
        classes = np.array(self.classes, dtype=object)
        predicted = np.full((len(frame), len(classes)) if len(classes) else len(frame), np.nan)
        if complete.any():
            predicted[complete] = self.outputs(frame[complete])
        values: NDArray[Any] = np.full(len(frame), None, dtype=object)
        values[complete] = classes[predicted[complete].argmax(1)] if len(classes) else predicted[complete]
        return TablePredictions(values.tolist(), predicted if len(classes) else None, notes)

    def _check_columns(self, columns: list[str], where: str) -> None:
        if absent := [name for name in self.columns if name not in columns]:
            similar = [(name, match) for name in absent for match in difflib.get_close_matches(name, columns, 1, 0.75)]
            hints = ", ".join(f"{match!r} is similar to {name!r}" for name, match in similar[:3])
            raise BilevelError(
                f"{where} lacks the column{'s' * (len(absent) > 1)} {listed(absent)}, which the model was trained on"
                f"{f' ({hints})' if hints else ''}. It has {listed(columns)}."
            )

    def save(self, path: Path) -> None:
        """Write one safetensors file, with the arrays as tensors and everything else as JSON in its metadata."""
        facts = {
            "kind": KIND,
            "version": VERSION,
            "model": self.model,
            "target": self.target,
            "classes": self.classes,
            "missing": self.missing,
            "settings": self.settings,
            "facts": self.facts,
        }
        if self.model == "additive":
            facts["additive"], tensors = additive_content(self.pipeline)
            write_tensors(path, tensors, facts)
            return
        facts["columns"] = described(self.pipeline["columns"])
        arrays = {f"{step}.{name}": getattr(self.pipeline[step], name) for step, name in LEARNED}
        write_tensors(path, {name: torch.tensor(array, dtype=torch.float64) for name, array in arrays.items()}, facts)


def field_notes(pipeline: Pipeline, frame: Any, where: str) -> list[str]:
    """A note for every column with empty fields, and for every column with unknown categories."""
    if isinstance(pipeline["columns"], FunctionTransformer):
        return additive_notes(pipeline, frame, where)
    notes = []
    for one in described(pipeline["columns"]):
        name, column = one["name"], frame[one["name"]]
        if one["fill"] is not None and (empty := int(column.isna().sum())):
            value = f"{one['fill']:.6g}" if isinstance(one["fill"], float) else repr(one["fill"])
            if one["kind"] in get_args(DateOrder):
                value = str(np.datetime64(int(one["fill"]), "D"))
            notes.append(
                f"Column {name!r}: {counted(empty, 'empty field')} of {where} filled with {value}, "
                f"{'the commonest value' if one['kind'] in ('truth values', 'categories') else 'the median'} of the "
                "training rows."
            )
        if one.get("categories"):
            same = f", as for {one['without_indicator']!r}" if one["without_indicator"] is not None else ""
            notes += unknown_categories(column, one["categories"], f"all of its indicators are 0 there{same}", where)
    return notes


def load(path: Path | str) -> TableModel:
    """Read a model from its file, or from the folder of `bilevel tune`. Its `pipeline` is ready to predict."""
    path = Path(path)
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        what = f"has no {FILE}" if path.is_dir() else "does not exist"
        raise BilevelError(f"{path} {what}. Pass the folder that `bilevel tune … --out DIR` wrote, or its {FILE}.")
    tensors, facts = read_tensors(file)
    if facts.get("kind") != KIND:
        raise BilevelError(
            f"{file} is a safetensors file, but holds no model of `bilevel tune`. Pass the folder that "
            "`bilevel tune … --out DIR` wrote."
        )
    if facts.get("version") != VERSION:
        raise BilevelError(
            f"{file} has version {facts.get('version')} of the format, and this release of bilevel reads version "
            f"{VERSION}. Install the release that wrote the file, or tune again."
        )
    try:
        additive = facts.get("model") == "additive"
        pipeline = additive_from(facts["additive"], tensors) if additive else _rebuilt(facts, tensors)
        model, target, missing, settings = (facts[name] for name in ("model", "target", "missing", "settings"))
        return TableModel(pipeline, model, target, missing, settings, dict(facts["facts"]))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise BilevelError(f"{file} is damaged: {error}.") from error


def _rebuilt(facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Pipeline:
    """The fitted pipeline from stored attributes. Only documented attributes of scikit-learn's classes are set."""
    columns, example = facts["columns"], _example_table(facts["columns"])
    steps = preprocessing({one["name"]: one["kind"] for one in columns}, facts["missing"] == "median")
    pipeline = Pipeline([*steps.steps, ("model", make_estimator(facts["model"], **facts["settings"]))])
    for step, name in LEARNED:
        array = tensors[f"{step}.{name}"].numpy()
        setattr(pipeline[step], name, array if array.ndim else float(array))
    if facts["model"] == "logistic":
        pipeline["model"].classes_ = np.array(facts["classes"], dtype=object)
    pipeline["columns"].fit(example)
    pipeline["varying"].n_features_in_ = len(pipeline["varying"].variances_)
    pipeline["scale"].n_features_in_ = pipeline["model"].n_features_in_ = int(pipeline["varying"].get_support().sum())
    pipeline.predict(example)  # fails if the shapes of the arrays do not fit each other
    return pipeline


def _example_table(columns: list[dict[str, Any]]) -> Any:
    """A table from which a ColumnTransformer learns the given medians, most common values and categories."""
    pandas = extras.load("pandas", extra="table", purpose="A model of a table")
    rows = 1 + max(len(one.get("categories", ())) for one in columns)
    content: dict[str, list[Any]] = {}
    for one in columns:
        known = one.get("categories", [])
        common = one["fill"] if one["fill"] is not None else known[0] if known else 0.0
        if one["kind"] in get_args(DateOrder):
            common = pandas.Timestamp(0) + pandas.Timedelta(days=common)
        # Every category once, and the most common value again in all other rows, of which there is at least one.
        content[one["name"]] = [*known, *[common] * (rows - len(known))]
    return pandas.DataFrame(content)
