"""A tuned model: from a table to predictions, and to a file and back. Nothing is ever pickled."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bilevel.errors import BilevelError
from bilevel.tabular.columns import Column, encode
from bilevel.tabular.target import Model, Target
from bilevel.tabular.values import Floats, Mask
from bilevel.tabular.words import listed

KIND, VERSION = "table model", 1
FILE = "model.safetensors"
ARRAYS = ("coefficients", "intercept", "mean", "scale", "penalty")


@dataclass(frozen=True)
class Predictions:
    """Predictions for the rows of a table, in their order.

    Args:
        values: numbers, or class names; None in rows with an empty field that nothing fills.
        probabilities: rows × classes, for a model of classes.
        notes: what was done on the way, one sentence each.
    """

    values: list[Any]
    probabilities: Floats | None
    notes: list[str]


@dataclass(frozen=True)
class TableModel:
    """A linear model of a table's columns, whose features are standardised: z = (x − mean) / scale.

    Args:
        model: ridge, elastic-net or logistic.
        target: what it predicts.
        columns: how columns become features.
        coefficients: outputs × features, of standardised features; one output for a number or two classes.
        intercept: one for each output.
        mean: of every feature, over the training rows.
        scale: their standard deviations; 1 for a feature that is constant there.
        penalty: of every standardised feature; NaN for a constant one.
        missing: the setting it was trained with.
        facts: where it comes from, for people.
    """

    model: Model
    target: Target
    columns: tuple[Column, ...]
    coefficients: Floats
    intercept: Floats
    mean: Floats
    scale: Floats
    penalty: Floats
    missing: str = "error"
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def features(self) -> list[str]:
        return [feature for column in self.columns for feature in column.features]

    def scores(self, features: Floats) -> Floats:
        """The linear predictor, rows × outputs, of features as they are in the table."""
        return (features - self.mean) / self.scale @ self.coefficients.T + self.intercept

    def probabilities(self, features: Floats) -> Floats:
        """Of every class, rows × classes."""
        scores = self.scores(features)
        if len(self.target.classes) == 2:
            scores = np.concatenate([np.zeros_like(scores), scores], axis=1)
        shifted = np.exp(scores - scores.max(1, keepdims=True))
        return shifted / shifted.sum(1, keepdims=True)

    def predict(self, frame: Any, where: str = "the table") -> Predictions:
        """Predictions for a DataFrame.

        Args:
            frame: has the columns that the model was trained on; others are ignored, with a note.
            where: what the frame is called in messages.
        """
        self._check_columns(list(frame.columns), where)
        # A model whose training left rows with empty fields out has nothing to say about such rows.
        features, notes = encode(frame, self.columns, where, gaps=self.missing == "drop")
        known: Mask = np.asarray(~np.isnan(features).any(1))
        if not known.all():
            first = int(np.flatnonzero(~known)[0]) + 1
            notes.append(
                f"{int((~known).sum())} of {len(known)} rows have empty fields (first row {first}) and get no "
                "prediction: the model was trained with --missing drop."
            )
        used = {column.name for column in self.columns} | {self.target.name, self.facts.get("weights")}
        if extra := [name for name in frame.columns if name not in used]:
            notes.append(f"Columns of {where} that the model does not use: {listed(extra)}.")
        filled = np.where(known[:, None], features, self.mean)
        if not self.target.classes:
            numbers = self.scores(filled)[:, 0]
            return Predictions([float(v) if k else None for v, k in zip(numbers, known, strict=True)], None, notes)
        chances = self.probabilities(filled)
        names = [self.target.classes[index] for index in chances.argmax(1)]
        chances[~known] = np.nan
        return Predictions([name if k else None for name, k in zip(names, known, strict=True)], chances, notes)

    def _check_columns(self, there: list[str], where: str) -> None:
        absent = [column.name for column in self.columns if column.name not in there]
        if not absent:
            return
        near = {name: difflib.get_close_matches(name, there, 1, 0.75) for name in absent}
        hints = [f"{match[0]!r} is near {name!r}" for name, match in near.items() if match]
        plural = "s" if len(absent) > 1 else ""
        raise BilevelError(
            f"{where} lacks the column{plural} {listed(absent)}, which the model was trained on"
            f"{' (' + ', '.join(hints[:3]) + ')' if hints else ''}. It has {listed(there)}."
        )

    def save(self, path: Path) -> None:
        """Write one safetensors file: the arrays, and everything else as JSON in its metadata."""
        import torch

        from bilevel.training.files import write_tensors

        facts = {
            "kind": KIND,
            "version": VERSION,
            "model": self.model,
            "target": self.target.name,
            "classes": list(self.target.classes),
            "columns": [column.plain() for column in self.columns],
            "missing": self.missing,
            "facts": self.facts,
        }
        write_tensors(path, {name: torch.from_numpy(np.array(getattr(self, name))) for name in ARRAYS}, facts)


def load(path: Path | str) -> TableModel:
    """Read a model from its file, or from the folder of `bilevel tune`."""
    from bilevel.training.files import read_tensors

    place = Path(path)
    file = place / FILE if place.is_dir() else place
    if not file.is_file():
        what = f"has no {FILE}" if place.is_dir() else "does not exist"
        raise BilevelError(f"{place} {what}; pass the folder that `bilevel tune … --out DIR` wrote, or its {FILE}.")
    tensors, facts = read_tensors(file)
    if facts.get("kind") != KIND:
        raise BilevelError(
            f"{file} is a safetensors file, but holds no model of `bilevel tune`. Pass the folder that "
            "`bilevel tune … --out DIR` wrote."
        )
    if facts.get("version") != VERSION:
        raise BilevelError(
            f"{file} has version {facts.get('version')} of the format and this bilevel reads {VERSION}; install the "
            "release that wrote it, or tune again."
        )
    try:
        columns = tuple(Column.of(plain) for plain in facts["columns"])
        target = Target(facts["target"], tuple(facts["classes"]))
        arrays = {name: tensors[name].double().numpy() for name in ARRAYS}
        model = TableModel(
            facts["model"], target, columns, **arrays, missing=facts["missing"], facts=dict(facts["facts"])
        )
    except (KeyError, TypeError) as error:
        raise BilevelError(f"{file} is damaged: {error} is missing or of another kind.") from error
    width, outputs = len(model.features), len(target.classes) if len(target.classes) > 2 else 1
    shapes = {"coefficients": (outputs, width), "intercept": (outputs,)} | dict.fromkeys(ARRAYS[2:], (width,))
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            raise BilevelError(f"{file} is damaged: {name} has the shape {arrays[name].shape}, not {shape}.")
    return model
