"""Tune the penalties of a table's model, judge it on rows it has not seen, and compare it with scikit-learn's."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bilevel.tabular.fitting import Fitted, estimator_class, fit, refit
from bilevel.tabular.groups import read_groups
from bilevel.tabular.model import TableModel
from bilevel.tabular.preparing import Prepared, prepare
from bilevel.tabular.reading import Table
from bilevel.tabular.rivals import Constant, Rival
from bilevel.tabular.scores import Score, class_score, regression_score, verdict
from bilevel.tabular.settings import TuneSettings
from bilevel.tabular.values import Floats
from bilevel.tabular.words import counted


@dataclass(frozen=True)
class Entry:
    """One line of the comparison: who, its test errors, the seconds that tuning and fitting took, and its penalty where
    it has a single one."""

    name: str
    score: Score
    seconds: float
    penalty: float | None = None


@dataclass(frozen=True)
class Study:
    """What a tuning found.

    Args:
        settings: what was asked.
        table: the data.
        prepared: its features and its split.
        model: what is saved; fitted to all rows unless settings.refit is off.
        judged: the model of the training rows alone, which the test errors are of.
        fitted: the tuned estimator's account of itself.
        entries: ours, scikit-learn's, and the best constant.
        verdict: whether it was worth it, in a sentence.
        groups: the names of the groups, where there are any.
        notes: what a reader needs to know about the table, one sentence each.
    """

    settings: TuneSettings
    table: Table
    prepared: Prepared
    model: TableModel
    judged: TableModel
    fitted: Fitted
    entries: tuple[Entry, ...]
    verdict: str
    groups: list[str]
    group_of: NDArray[np.int64] | None
    notes: list[str]

    @property
    def measures(self) -> tuple[str, str]:
        """The names of `Score.share` and `Score.main`."""
        return ("accuracy", "log loss") if self.model.target.classes else ("R²", "RMSE")

    def test_predictions(self) -> tuple[NDArray[Any], Floats]:
        """The truth of the test rows, and ours: numbers, or probabilities rows × classes."""
        prepared = self.prepared
        return prepared.y[prepared.test], _predicted(self.judged, prepared.features[prepared.test])


def tune(
    table: Table, settings: TuneSettings, *, verbose: bool = False, doing: Callable[[str], None] = lambda what: None
) -> Study:
    """Tune the penalties on the training rows by cross-validation, and judge the model on the others.

    Args:
        table: as `read_table` gives it.
        settings: what to do.
        verbose: show a bar of the hyperiterations.
        doing: is told what is being done, for a line on the terminal.
    """
    prepared = prepare(table, settings)
    names, groups = read_groups(str(settings.groups), prepared.columns) if settings.penalty == "groups" else ([], None)
    used = prepared.used
    X, y = prepared.standardised(prepared.train)[:, used], prepared.y[prepared.train]
    weights = None if prepared.weights is None else prepared.weights[prepared.train]
    folds = prepared.folds(settings)

    doing("tuning the penalties")
    estimator_class(prepared.model)
    began = time.perf_counter()
    fitted = fit(prepared.model, X, y, weights, folds, settings, None if groups is None else groups[used], verbose)
    ours = time.perf_counter() - began
    judged = _model(prepared, settings, table, fitted)

    rival = Rival(prepared.model, folds, settings.l1_ratio)
    doing(f"fitting {rival.name}")
    began = time.perf_counter()
    opponent = rival.fit(X, y, weights)
    theirs = time.perf_counter() - began
    constant = Constant.of(y, weights, len(prepared.target.classes))

    held_out = prepared.standardised(prepared.test)[:, used]
    classes = bool(prepared.target.classes)
    entries = (
        Entry("bilevel", _score(prepared, _predicted(judged, prepared.features[prepared.test])), ours),
        Entry(
            rival.name,
            _score(prepared, opponent.predict_proba(held_out) if classes else opponent.predict(held_out)),
            theirs,
            rival.penalty(opponent),
        ),
        Entry(
            "class frequencies" if classes else "mean of the training rows",
            _score(prepared, constant.predict(int(prepared.test.sum()))),
            0.0,
        ),
    )
    model = judged
    if settings.refit:
        doing("fitting to all rows")
        every = np.ones(len(prepared.y), dtype=bool)
        final = refit(
            prepared.model, fitted, prepared.standardised(every)[:, used], prepared.y, prepared.weights, settings
        )
        model = _model(prepared, settings, table, final)
    measure = "log loss" if classes else "RMSE"
    alike = bool(np.ptp(np.log(fitted.penalty)) < 1e-6)
    said = verdict(entries[0].score, entries[1].score, rival.name, measure, alike)
    return Study(
        settings,
        table,
        prepared,
        model,
        judged,
        fitted,
        entries,
        said,
        names,
        groups,
        [*prepared.notes, *_about(settings, prepared, rival, alike)],
    )


def _about(settings: TuneSettings, prepared: Prepared, rival: Rival, alike: bool) -> list[str]:
    train, test = int(prepared.train.sum()), int(prepared.test.sum())
    notes = [
        f"Features are standardised with the training rows' means and deviations; {rival.name} gets the same features, "
        f"rows and folds, and searches {rival.grid}.",
    ]
    if alike and settings.penalty != "shared" and prepared.used.sum() > 1:
        notes.append("All penalties came out equal: letting them differ did not lower the cross-validation error.")
    if settings.refit:
        notes.append(
            f"The errors are of {counted(test, 'test row')}, by a model of the other {train:,}. The saved model has "
            f"the same penalties and is fitted to all {train + test:,}; --no-refit keeps the first."
        )
    else:
        notes.append(
            f"The errors are of {counted(test, 'test row')}; the saved model is the one of the other {train:,} rows."
        )
    return notes


def _model(prepared: Prepared, settings: TuneSettings, table: Table, fitted: Fitted) -> TableModel:
    """The fitted numbers in the places of all features; one that is constant in training has no coefficient."""
    width = len(prepared.used)
    coefficients = np.zeros((len(fitted.intercept), width))
    coefficients[:, prepared.used] = fitted.coefficients
    penalty = np.full(width, np.nan)
    penalty[prepared.used] = fitted.penalty
    facts = {
        "data": table.path.name,
        "sha256": table.sha256,
        "rows": len(prepared.y),
        "weights": settings.weights,
        "penalty": settings.penalty,
        "l1_ratio": settings.l1_ratio if prepared.model == "elastic-net" else None,
        "fitted_to": "all rows" if settings.refit else "training rows",
    }
    return TableModel(
        prepared.model,
        prepared.target,
        prepared.columns,
        coefficients,
        fitted.intercept,
        prepared.mean,
        prepared.scale,
        penalty,
        settings.missing,
        facts,
    )


def _predicted(model: TableModel, features: Floats) -> Floats:
    return model.probabilities(features) if model.target.classes else model.scores(features)[:, 0]


def _score(prepared: Prepared, predicted: Floats) -> Score:
    rows = prepared.test
    weights = np.ones(int(rows.sum())) if prepared.weights is None else prepared.weights[rows]
    scored = class_score if prepared.target.classes else regression_score
    return scored(prepared.y[rows], predicted, weights)
