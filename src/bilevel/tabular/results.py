"""The result of a tuning as JSON data: features or effects, the record in result.json, and the points of charts."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from sklearn.metrics import confusion_matrix

from bilevel.tabular.candidates import MIN_PENALTY
from bilevel.tabular.columns import columns_of_features, transformed
from bilevel.tabular.comparing import ComparedModel
from bilevel.tabular.study import TableStudy
from bilevel.tabular.values import Floats

# A feature counts as switched off if its shrinkage is above this value.
OFF = 0.95
# The number of effects whose curves are stored, and the number of points of each.
MAX_EFFECTS, POINTS, PAIR_POINTS = 16, 60, 24
MAX_POINTS = 3000  # of a chart of held-out rows; more points cannot be distinguished


def shrinkage(study: TableStudy) -> Floats:
    """s_j = α_j [(ZᵀZ + diag α)⁻¹]_jj: 0 if the data determine a coefficient, 1 if the penalty does.

    Z are the centred rows. For classes, each row is multiplied by √(p (1 − p)), and s is the mean over classes. For the
    elastic net, α is the penalty of the squares, and s_j = 1 if the coefficient is 0. Σ_j (1 − s_j) is the effective
    number of features. If z_j is orthogonal to the other features, its coefficient is 1 − s_j times that of least
    squares.
    """
    used, model = study.used, study.model
    frame = used.frame
    X = transformed(model.pipeline[:-1], frame)
    weights = np.ones(len(X)) if used.weights is None else used.weights
    penalty, outputs = model.penalty, [weights]
    if model.model == "elastic-net":
        penalty = penalty * weights.sum() * (1 - model.pipeline[-1].l1_ratio)
    elif model.classes:
        outputs = [weights * p * (1 - p) for p in model.outputs(frame)[:, -len(model.coefficients) :].T]
    active = np.any(model.coefficients != 0, axis=0)
    shares = np.ones(len(active))
    shares[active] = np.mean([_shrinkage(X[:, active], penalty[active], each) for each in outputs], axis=0)
    return shares


def _shrinkage(X: Floats, penalty: Floats, weights: Floats) -> Floats:
    """α_j [(ZᵀZ + diag α)⁻¹]_jj = 1 − u_jᵀ (I + UUᵀ)⁻¹ u_j with u_j = z_j / √α_j. The smaller matrix is inverted."""
    if not X.shape[1] or not weights.sum() > 0:
        return np.ones(X.shape[1])
    centred = np.sqrt(weights)[:, None] * (X - weights @ X / weights.sum())
    U = centred / np.sqrt(np.maximum(penalty, MIN_PENALTY))
    if len(U) < U.shape[1]:
        kept = np.einsum("ij,ij->j", U, np.linalg.solve(np.eye(len(U)) + U @ U.T, U))
        return np.clip(1 - kept, 0, 1)
    return np.clip(np.diag(np.linalg.inv(np.eye(U.shape[1]) + U.T @ U)), 0, 1)


def feature_rows(study: TableStudy) -> list[dict[str, Any]]:
    """Every feature of the saved model, in the order of the table's columns.

    `coefficients` are those of the standardised feature, one for each output, and `penalty` is its α.
    `coefficients_raw` and `penalty_raw` = α · scale² are in the units of the table. `off` is true if `shrinkage` is
    above 0.95 or all coefficients are 0.
    """
    model = study.model
    scale, amount = model.pipeline["scale"].scale_, shrinkage(study)
    rows = []
    for j, (name, column) in enumerate(zip(model.features, columns_of_features(model.pipeline), strict=True)):
        coefficients = model.coefficients[:, j]
        rows.append(
            {
                "name": name,
                "column": column,
                "group": study.groups.get(column, ""),
                "coefficients": coefficients.tolist(),
                "coefficients_raw": (coefficients / scale[j]).tolist(),
                "penalty": float(model.penalty[j]),
                "penalty_raw": float(model.penalty[j] * scale[j] ** 2),
                "shrinkage": float(amount[j]),
                "off": bool((coefficients == 0).all() or amount[j] > OFF),
            }
        )
    position = {name: k for k, name in enumerate(study.table.columns)}
    return sorted(rows, key=lambda row: position[row["column"]])


def features_csv(rows: Sequence[dict[str, Any]], classes: Sequence[str]) -> str:
    """The features as CSV. With more than two classes, there is a coefficient column for each class."""
    suffixes = [f" {name}" for name in classes] if len(classes) > 2 else [""]
    group = ["group"] if any(row["group"] for row in rows) else []
    plain, several = ["penalty", "penalty_raw", "shrinkage", "off"], ["coefficients", "coefficients_raw"]
    named = [word + suffix for word in ("coefficient", "coefficient_raw") for suffix in suffixes]
    lines = [["feature", "column", *group, *named, *plain]]
    for row in rows:
        texts = [row[key] for key in ["name", "column", *group]]
        lines.append([*texts, *(value for key in several for value in row[key]), *(row[key] for key in plain)])
    return _as_csv(lines)


def effect_rows(model: Any) -> list[dict[str, Any]]:
    """Every term with its importance and penalties, the most important first, and the effects of the first 16.

    `shape` is "curve", "categories" or "pair". An effect has a `grid` (for a pair, one per column, and the names of its
    `columns`). For each output it has the `mean`, the ends `low` and `high` of its band (not for a pair), and
    `missing`, the effect of a missing value or None. With two classes, effects are on the log-odds of the second. With
    more, there is an output for each.
    """
    rows = []
    for place, name in enumerate(sorted(model.terms_, key=lambda name: -model.importance_[name])):
        row = {"term": name, "importance": model.importance_[name], "penalties": dict(model.penalties_[name])}
        if place < MAX_EFFECTS and model.importance_[name] > 0:
            row |= _effect(model, name)
        rows.append(row)
    return rows


def _effect(model: Any, name: str) -> dict[str, Any]:
    outputs = []
    effect = model.effect(name, 2)
    pair = isinstance(effect.grid, tuple)
    for output in range(-len(model._coef), 0):
        effect = model.effect(name, PAIR_POINTS if pair else POINTS, output)
        low, high = effect.band()
        missing = None if effect.missing is None else effect.missing[0]
        outputs.append(
            {"mean": effect.mean.tolist(), "missing": missing}
            | ({} if pair else {"low": low.tolist(), "high": high.tolist()})
        )
    grids = [grid.tolist() for grid in (effect.grid if pair else (effect.grid,))]
    texts = np.asarray(effect.grid[0] if pair else effect.grid).dtype.kind == "O"
    shape = "pair" if pair else "categories" if texts else "curve"
    found = {"shape": shape, "grid": grids if pair else grids[0], "outputs": outputs}
    if pair:
        of = model._design.pairs[model.terms_.index(name) - len(model._design.terms)]
        found["columns"] = [model.terms_[of.first], model.terms_[of.second]]
    return found


def effects_csv(rows: Sequence[dict[str, Any]]) -> str:
    """The terms as CSV, one row for each part of a term, with its penalty."""
    lines = [["term", "importance", "part", "penalty"]]
    for row in rows:
        lines += [[row["term"], row["importance"], *part] for part in row["penalties"].items() or [("", "")]]
    return _as_csv(lines)


def _as_csv(lines: list[list[Any]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(lines)
    return out.getvalue()


def result_record(study: TableStudy) -> dict[str, Any]:
    """Everything but the predictions, as JSON data. Numbers may be NaN."""
    used, model, table = study.used, study.model, study.table
    estimator = model.pipeline[-1]
    verdict, comparison = study.verdict, study.comparison
    return {
        "kind": "tune",
        "data": {
            "file": table.path.name,
            "sha256": table.sha256,
            "rows": len(table.frame),
            "rows_used": len(used.y),
            "columns": table.columns,
        },
        "target": model.target,
        "classes": model.classes,
        "task_chosen_because": used.reason,
        "model": model.model,
        "penalty": "per part of every term" if model.model == "additive" else study.settings.penalty,
        "comparison": [compared_row(study, one) for one in comparison.models],
        "folds": len(verdict.ours.losses),
        "repeats": comparison.repeats,
        "saved": verdict.ours.name,
        "recommended": verdict.best.name,
        "verdict": verdict.sentence,
        **(_additive_record(study) if model.model == "additive" else _linear_record(study)),
        "intercept": np.atleast_1d(estimator.intercept_).tolist(),
        "notes": study.notes,
        "method": estimator.method_,
        "outcome": estimator.outcome_,
        "certificate": str(getattr(estimator, "certificate_", "")),
        "iterations": estimator.n_iter_,
        "history": {name: np.asarray(values, dtype=float).tolist() for name, values in estimator.history_.items()},
        "settings": asdict(study.settings),
    }


def _linear_record(study: TableStudy) -> dict[str, Any]:
    assert study.shared is not None
    features = feature_rows(study)
    return {
        "shared_penalty": dict(zip(("name", "penalty"), study.shared, strict=True)),
        "variance": study.variance,
        "features": features,
        "switched_off": [one["name"] for one in features if one["off"]],
        "effective_features": sum(1 - one["shrinkage"] for one in features),
    }


def _additive_record(study: TableStudy) -> dict[str, Any]:
    estimator = study.model.pipeline[-1]
    return {"effects": effect_rows(estimator), "criterion": estimator.criterion_}


def compared_row(study: TableStudy, one: ComparedModel) -> dict[str, Any]:
    """One model of the comparison. `p` is that of the test against the best model; None for the best model."""
    test = study.verdict.tests.get(one.name)
    return {
        "name": one.name,
        "ours": one.own,
        **one.scores,
        "seconds": one.seconds,
        "p": None if test is None else test.p,
        "fold_losses": one.losses.tolist(),
    }


def chart_points(study: TableStudy) -> dict[str, Any]:
    """Points of held-out rows for a chart: their numbers in the file, the true values, and the predictions of the best
    of our models in the first repeat. At most `MAX_POINTS` rows, evenly spaced."""
    tested, classes = study.comparison.tested, study.model.classes
    truth, predicted = study.used.y[tested], study.verdict.ours.predicted[tested]
    rows = study.used.frame.index[tested].to_numpy() + 1
    chosen = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), MAX_POINTS)).round().astype(int))
    points: dict[str, Any] = {"rows": rows[chosen].tolist(), "of": len(rows)}
    if not classes:
        return points | {"truth": truth[chosen].tolist(), "predicted": predicted[chosen].tolist()}
    codes = np.searchsorted(classes, truth)
    confusion = confusion_matrix(codes, predicted.argmax(1), labels=range(len(classes)))
    probabilities = predicted[chosen, 1].tolist() if len(classes) == 2 else []
    return points | {"truth": codes[chosen].tolist(), "predicted": probabilities, "confusion": confusion.tolist()}
