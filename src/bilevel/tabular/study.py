"""Compare our models of a table with scikit-learn's, and fit the best of ours to all rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.pipeline import Pipeline

from bilevel.tabular.additive import additive_pipeline
from bilevel.tabular.candidates import additive_estimator, make_estimator, one_penalty
from bilevel.tabular.comparing import ComparedModel, Doing, ModelComparison, compare, fold_features, penalty_of
from bilevel.tabular.formatting import counted, listed
from bilevel.tabular.groups import column_groups
from bilevel.tabular.leaks import leaks
from bilevel.tabular.model import TableModel, field_notes
from bilevel.tabular.preparing import UsedTable, used_table
from bilevel.tabular.reading import DataTable
from bilevel.tabular.scores import explained_shares, score_shares
from bilevel.tabular.settings import ModelKind, TuneSettings
from bilevel.tabular.verdicts import TableVerdict, table_verdict


@dataclass(frozen=True)
class TableStudy:
    """The result of a tuning.

    Args:
        settings: the settings of the tuning.
        table: the table as it was read.
        used: the rows and columns that were used.
        model: the best of our models, tuned and fitted on all rows. It is saved.
        groups: the group of every column, if features share penalties by groups.
        comparison: the errors of all models on held-out rows.
        verdict: which model to use.
        variance: the share of the variance that each group or column explains.
        shared: the name of scikit-learn's model with one penalty for all features, and that penalty; None for the
            additive model.
        notes: sentences about the table and the models, for the reader of the result.
    """

    settings: TuneSettings
    table: DataTable
    used: UsedTable
    model: TableModel
    groups: dict[str, str]
    comparison: ModelComparison
    verdict: TableVerdict
    variance: dict[str, float]
    shared: tuple[str, float] | None
    notes: list[str]


def tune(table: DataTable, settings: TuneSettings, *, doing: Doing = lambda what: None) -> TableStudy:
    """Compare models by repeated cross-validation, and fit the best of ours to all rows.

    Args:
        table: a table from `read_table`.
        settings: the settings.
        doing: a function that is called with a text about the current work, for a line on the terminal.
    """
    used = used_table(table, settings)
    groups = column_groups(settings.group, list(used.kinds), table.columns) if settings.group else {}
    fill = settings.missing == "median"
    doing("looking for leaks")
    hints = leaks(used, fill)
    comparison = compare(used, settings, groups, doing)
    verdict = table_verdict(comparison, sorted(set(used.y.tolist())) if used.classes else [])
    kind = verdict.ours.kind
    assert kind is not None
    doing(f"{verdict.ours.name} on all rows")
    shared = None
    if kind == "additive":
        model = _fitted_additive(table, used, settings)
    else:
        model, X = _fitted(table, used, settings, groups, kind)
        folds = used.splits.inner(np.arange(len(used.y)))
        shared = one_penalty(kind, X, used.y, used.weights, folds, settings.l1_ratio, used.splits.exchangeable)
    notes = [*used.notes, *hints, *_notes(table, settings, used, comparison, model, verdict)]
    variance = _variance_by_group(used, verdict.ours, groups)
    return TableStudy(settings, table, used, model, groups, comparison, verdict, variance, shared, notes)


def _fitted(
    table: DataTable, used: UsedTable, settings: TuneSettings, groups: dict[str, str], kind: ModelKind
) -> tuple[TableModel, Any]:
    """The model of all rows, and their features."""
    rows = np.arange(len(used.y))
    steps, X = fold_features(used, rows, settings.missing == "median")
    arguments = {
        "penalty": penalty_of(settings, groups, steps),
        "cv": settings.cv,
        "max_iter": settings.max_iter,
        "seed": settings.seed,
        "l1_ratio": settings.l1_ratio,
    }
    estimator = make_estimator(kind, **{**arguments, "cv": used.splits.inner(rows)})
    estimator.fit(X, used.y, sample_weight=used.weights)
    # These folds hold row numbers. A clone that is fitted to other rows needs its own folds.
    estimator.set_params(cv=settings.cv)
    pipeline = Pipeline([*steps.steps, ("model", estimator)])
    return TableModel(pipeline, kind, settings.target, settings.missing, arguments, _facts(table, used, settings)), X


def _fitted_additive(table: DataTable, used: UsedTable, settings: TuneSettings) -> TableModel:
    """The additive model of all rows."""
    folds = None if used.splits.exchangeable else used.splits.inner(np.arange(len(used.y)))
    estimator = additive_estimator(used.classes, cv=folds, max_iter=settings.max_iter, seed=settings.seed)
    pipeline = additive_pipeline(used.kinds, settings.missing == "median", estimator)
    pipeline.fit(used.frame, used.y, model__sample_weight=used.weights)
    if folds is not None:
        # As for linear models: these folds hold row numbers.
        estimator.set_params(cv=settings.cv)
    return TableModel(pipeline, "additive", settings.target, settings.missing, facts=_facts(table, used, settings))


def _variance_by_group(used: UsedTable, model: ComparedModel, groups: Mapping[str, str]) -> dict[str, float]:
    """The share that each group explains, the largest first. Without groups, the share of each column."""
    if model.contributions is None:
        return {}
    columns = list(used.kinds)
    names = list(dict.fromkeys(groups.get(column, column) for column in columns))
    group_index = np.array([names.index(groups.get(column, column)) for column in columns])
    tested = ~np.isnan(model.contributions[:, 0, 0])
    parts = model.contributions[tested] @ np.eye(len(names))[group_index]
    weights = None if used.weights is None else used.weights[tested]
    if used.classes:
        shares = score_shares(parts)
    else:
        shares = explained_shares(parts[:, 0], used.y[tested], model.predicted[tested], weights)
    share_of = dict(zip(names, shares.tolist(), strict=True))
    return dict(sorted(share_of.items(), key=lambda item: -item[1]))


def _facts(table: DataTable, used: UsedTable, settings: TuneSettings) -> dict[str, Any]:
    return {"data": table.path.name, "sha256": table.sha256, "rows": len(used.y), "weights": settings.weights}


def _notes(
    table: DataTable,
    settings: TuneSettings,
    used: UsedTable,
    comparison: ModelComparison,
    model: TableModel,
    verdict: TableVerdict,
) -> list[str]:
    notes = field_notes(model.pipeline, used.frame, table.path.name)
    notes += [] if model.model == "additive" else _linear_notes(model, settings)
    folds = len(verdict.ours.losses)
    splits = (
        "in order of time"
        if used.splits.in_time
        else f"{settings.cv} folds, drawn {counted(comparison.repeats, 'time')}"
    )
    notes += [
        *comparison.notes,
        f"Errors are of rows that a model was not fitted to ({splits}): all models saw the same {folds} splits, with "
        "columns prepared and penalties tuned on the training rows. scikit-learn's models have their default settings, "
        "but RidgeCV and LogisticRegressionCV have wider grids of penalties.",
        f"The saved model is tuned and fitted on all {len(used.y):,} rows.",
    ]
    return notes


def _linear_notes(model: TableModel, settings: TuneSettings) -> list[str]:
    notes = []
    names, varying = model.pipeline["columns"].get_feature_names_out(), model.pipeline["varying"].get_support()
    if not varying.all():
        notes.append(f"Constant, and so without a coefficient: {listed(names[~varying])}.")
    equal = bool(np.ptp(np.log(np.maximum(model.penalty, 1e-300))) < 1e-6)
    if equal and settings.penalty != "shared" and varying.sum() > 1:
        notes.append("All penalties came out equal: letting them differ did not lower the cross-validation error.")
    return notes
