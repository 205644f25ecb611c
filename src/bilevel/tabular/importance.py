"""The features of a tuned model in numbers: coefficients, penalties, and which features are switched off."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from typing import Any

import numpy as np

from bilevel.tabular.model import TableModel
from bilevel.tabular.penalised import LEAST
from bilevel.tabular.study import Study
from bilevel.tabular.values import Floats

# A feature whose coefficient is held by its penalty to more than this is switched off.
OFF = 0.95


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
        off: held by its penalty to more than 95 %, or with a coefficient of exactly 0.
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
    """What holds every coefficient: s_j = α_j [(ZᵀZ + diag α)⁻¹]_jj, from 0 (the data do) to 1 (its penalty does).

    Z are the centred training rows; for classes, each times √(p (1 − p)), and the mean over classes is taken. Of the
    elastic net's penalty the squares count, and a coefficient of 0 is held wholly. Σ_j (1 − s_j) is the number of free
    features that the model is worth. Alone, a feature would keep the share 1 − s of its least-squares coefficient.
    """
    prepared, model = study.prepared, study.judged
    rows, used = prepared.train, prepared.used
    X = prepared.standardised(rows)[:, used]
    weights = np.ones(len(X)) if prepared.weights is None else prepared.weights[rows]
    penalty = model.penalty[used]
    outputs: list[Floats] = [weights]
    if model.model == "elastic-net":
        penalty = penalty * weights.sum() * (1 - study.settings.l1_ratio)
    elif model.target.classes:
        chances = model.probabilities(prepared.features[rows])[:, -len(model.intercept) :]
        outputs = [weights * p * (1 - p) for p in chances.T]
    found = np.ones(len(used))
    active = np.any(model.coefficients[:, used] != 0, axis=0)
    held = np.mean([_held(X[:, active], penalty[active], each) for each in outputs], axis=0)
    found[np.flatnonzero(used)[active]] = held
    return found


def _held(X: Floats, penalty: Floats, weights: Floats) -> Floats:
    """α_j [(ZᵀZ + diag α)⁻¹]_jj = 1 − u_jᵀ (I + UUᵀ)⁻¹ u_j with u_j = z_j / √α_j, by the smaller matrix of the two."""
    if not X.shape[1] or not weights.sum() > 0:
        return np.ones(X.shape[1])
    centred = np.sqrt(weights)[:, None] * (X - weights @ X / weights.sum())
    U = centred / np.sqrt(np.maximum(penalty, LEAST))
    if len(U) < U.shape[1]:
        kept = np.einsum("ij,ij->j", U, np.linalg.solve(np.eye(len(U)) + U @ U.T, U))
        return np.clip(1 - kept, 0, 1)
    return np.clip(np.diag(np.linalg.inv(np.eye(U.shape[1]) + U.T @ U)), 0, 1)


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
                float(lost[index]),
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
