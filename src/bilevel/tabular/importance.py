"""The features of a tuned model in numbers: coefficients, penalties, and which features are switched off."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from typing import Any

import numpy as np

from bilevel.tabular.model import TableModel
from bilevel.tabular.study import Study
from bilevel.tabular.values import Floats

# A feature whose coefficient is shrunk by more than this, were it alone, is switched off.
OFF = 0.99


@dataclass(frozen=True)
class Feature:
    """One feature of the saved model.

    Args:
        name: as in the table, or `column=value` for an indicator.
        column: of the table.
        group: which it shares its penalty with, or "".
        coefficients: per deviation of the feature, one for each output.
        raw: the same per unit of the table.
        penalty: α of the standardised feature, NaN if it was constant in training.
        raw_penalty: α of the feature in the table's units, α · scale².
        shrinkage: between 0 (free) and 1 (off); see `shrinkage`.
        off: shrunk by more than 99 %, or with a coefficient of exactly 0.
    """

    name: str
    column: str
    group: str
    coefficients: tuple[float, ...]
    raw: tuple[float, ...]
    penalty: float
    raw_penalty: float
    shrinkage: float
    off: bool

    @property
    def size(self) -> float:
        """The length of its coefficients."""
        return float(np.linalg.norm(self.coefficients))


def shrinkage(study: Study) -> Floats:
    """How much of its coefficient every feature would lose if it stood alone: α / (α + h).

    h is what the data say about a standardised feature: n for ridge (Σ z² over the training rows), 1 for the elastic
    net, whose error is a mean (of its penalty, the part with squares), and n Σ_k p_k (1 − p_k) / K' for classes of
    frequencies p_k, with K' = 2 for two of them and K otherwise.
    """
    prepared, model = study.prepared, study.model
    weights = np.ones(len(prepared.y)) if prepared.weights is None else prepared.weights
    rows = float(weights[prepared.train].sum())
    if model.model == "ridge":
        known = rows
    elif model.model == "elastic-net":
        known = 1.0
    else:
        counts = np.bincount(prepared.y[prepared.train], weights=weights[prepared.train])
        share = counts / counts.sum()
        known = rows * float((share * (1 - share)).sum()) / len(share)
    ratio = 1 - study.settings.l1_ratio if model.model == "elastic-net" else 1.0
    return ratio * model.penalty / (ratio * model.penalty + known)


def features(study: Study) -> list[Feature]:
    """Every feature, in the table's order."""
    model = study.model
    owners = [column.name for column in model.columns for _ in column.features]
    lost = shrinkage(study)
    found = []
    for index, name in enumerate(model.features):
        coefficients = model.coefficients[:, index]
        constant = bool(np.isnan(model.penalty[index]))
        found.append(
            Feature(
                name,
                owners[index],
                study.groups[int(study.group_of[index])] if study.group_of is not None else "",
                tuple(coefficients.tolist()),
                tuple((coefficients / model.scale[index]).tolist()),
                float(model.penalty[index]),
                float(model.penalty[index] * model.scale[index] ** 2),
                1.0 if constant else float(lost[index]),
                constant or bool((coefficients == 0).all()) or bool(lost[index] > OFF),
            )
        )
    return found


def table_csv(model: TableModel, rows: list[Feature]) -> str:
    """The features as CSV; a coefficient column for each class where there are more than two."""
    outputs = list(model.target.classes) if len(model.target.classes) > 2 else []
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    grouped = any(row.group for row in rows)

    def named(what: str) -> list[str]:
        return [f"{what} {name}" for name in outputs] or [what]

    first = ["feature", "column", *(["group"] if grouped else []), *named("coefficient"), *named("coefficient_raw")]
    writer.writerow([*first, "penalty", "penalty_raw", "shrinkage", "off"])
    for row in rows:
        cells: list[Any] = [row.name, row.column, *([row.group] if grouped else []), *row.coefficients, *row.raw]
        penalties = ["" if np.isnan(value) else value for value in (row.penalty, row.raw_penalty)]
        writer.writerow([*cells, *penalties, row.shrinkage, row.off])
    return out.getvalue()
