"""From a table to the rows and columns that are used, with the target, the weights and the splits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bilevel.errors import BilevelError
from bilevel.tabular.checking import check_target, feature_kinds
from bilevel.tabular.columns import FeatureKind
from bilevel.tabular.dates import as_days, date_order
from bilevel.tabular.formatting import check_names, counted, listed
from bilevel.tabular.reading import DataTable
from bilevel.tabular.settings import TuneSettings
from bilevel.tabular.splits import Splits
from bilevel.tabular.values import Floats, Mask, first_of, first_row, kind_of, labels_of, numbers_of


@dataclass(frozen=True)
class UsedTable:
    """The rows and columns of a table that are used. With --time, rows are in order of time.

    Args:
        classes: whether the target holds classes (as text) or numbers.
        reason: why, if no setting says so.
        frame: the feature columns as they were read. The index is the row of the file, from 0.
        kinds: how each column becomes features.
        y: the target.
        weights: the weight of every row, with a mean of 1; None without --weights.
        splits: the folds.
        notes: sentences about what was left out or changed.
    """

    classes: bool
    reason: str
    frame: Any
    kinds: dict[str, FeatureKind]
    y: NDArray[Any]
    weights: Floats | None
    splits: Splits
    notes: list[str]


def used_table(table: DataTable, settings: TuneSettings) -> UsedTable:
    """Check the table, and select its rows and columns."""
    columns = _feature_columns(table, settings)
    target = table.frame[settings.target]
    classes, reason = check_target(target, settings)
    kinds, notes = feature_kinds(table.frame[columns], settings)
    if not kinds:
        raise BilevelError(f"{table.path} has no column to learn from. " + " ".join(notes))
    keep, removal_notes = _kept_rows(table, list(kinds), target, settings)
    rows = np.flatnonzero(keep)
    if settings.time is not None:
        times = table.frame[settings.time].iloc[rows]
        dates = kind_of(times) == "date"
        if dates and date_order(times) is None:
            raise BilevelError(
                f"--time {settings.time!r} holds dates ({first_of(times, times.notna())}), and no value tells whether "
                "the day or the month comes first. Write them as 2024-03-31."
            )
        order = as_days(times) if dates else numbers_of(times)
        if (bad := ~np.isfinite(order)).any():
            raise BilevelError(
                f"--time {settings.time!r} needs a date or a number in every row ({first_of(times, bad)})."
            )
        rows = rows[np.argsort(order, kind="stable")]
        notes.append(f"Rows are in order of {settings.time!r}, which is not a feature.")
    frame = table.frame.iloc[rows][list(kinds)]
    y = (labels_of if classes else numbers_of)(target.iloc[rows])
    _enough_rows(table, settings, y, classes)
    together = None
    if settings.groups is not None:
        together = labels_of(table.frame[settings.groups].iloc[rows])
        if (count := len(set(together))) < 2 * settings.cv:
            raise BilevelError(
                f"--groups {settings.groups!r} has {counted(count, 'group')}, and --cv {settings.cv} needs "
                f"{2 * settings.cv}. Write fewer folds."
            )
        notes.append(f"Rows with the same {settings.groups!r} ({count:,} groups) are never on both sides of a split.")
    in_time = settings.time is not None
    splits = Splits(y, classes=classes, together=together, in_time=in_time, count=settings.cv, seed=settings.seed)
    if together is not None or in_time:
        splits.check(settings.repeats)
    notes = removal_notes + notes
    weights = None
    if settings.weights is not None:
        weights = _weights(table, settings.weights, rows)
        notes.append(f"The weights {settings.weights!r} are divided by their mean.")
    return UsedTable(classes, reason, frame, kinds, y, weights, splits, notes)


def _feature_columns(table: DataTable, settings: TuneSettings) -> list[str]:
    special = {"--weights": settings.weights, "--groups": settings.groups, "--time": settings.time}
    if settings.groups is not None and settings.groups not in table.columns:
        raise BilevelError(
            f"--groups {settings.groups!r} is not a column of the table. --groups keeps rows with the same value "
            f"together. For features that share a penalty, write --group {settings.groups}. Columns: "
            f"{listed(table.columns, 30)}."
        )
    for flag, names in (
        ("--target", [settings.target]),
        ("--drop", settings.drop),
        ("--categorical", settings.categorical),
        *((flag, [name]) for flag, name in special.items() if name is not None),
    ):
        check_names(names, flag, table.columns)
    left_out = {settings.target, *special.values(), *settings.drop}
    for name in settings.categorical:
        if name in left_out:
            raise BilevelError(
                f"--categorical {name!r} is not a feature: it is the target, the weights, groups or time, or dropped."
            )
    names = [name for name in table.columns if name not in left_out]
    if not names:
        raise BilevelError(
            f"{table.path} has no column left to predict {settings.target!r} from. It was read with the columns "
            f"{listed(table.columns)}." + (" Is --separator right?" if table.kind == "CSV" else "")
        )
    return names


def _kept_rows(table: DataTable, columns: list[str], target: Any, settings: TuneSettings) -> tuple[Mask, list[str]]:
    frame = table.frame[columns]
    keep = target.notna().to_numpy(dtype=bool)
    notes = []
    if not keep.all():
        count = counted(int((~keep).sum()), "row")
        if settings.missing == "error":
            raise BilevelError(
                f"The target {settings.target!r} has no value in {count}, first in row "
                f"{first_row(target, ~keep)}. Write --missing drop to leave out rows with any empty field, or "
                "--missing median to leave out only rows without a target. (Fields like NA, NaN, None and "
                "null count as empty.)"
            )
        notes.append(f"Left out {count} without a target.")
    if settings.groups is not None and (gap := table.frame[settings.groups].isna().to_numpy(dtype=bool) & keep).any():
        raise BilevelError(f"--groups {settings.groups!r} has no value in row {first_row(target, gap)}. Fill it in.")
    gaps = frame[keep].isna()
    if settings.missing == "drop" and gaps.to_numpy().any():
        count = counted(int(gaps.any(axis=1).sum()), "row")
        notes.append(f"Left out {count} with empty fields in {listed(gaps.columns[gaps.any()])}.")
        keep = keep & frame.notna().all(axis=1).to_numpy(dtype=bool)
    return keep, notes


def _enough_rows(table: DataTable, settings: TuneSettings, y: NDArray[Any], classes: bool) -> None:
    rows, enough = len(y), rows_needed(settings.cv)
    if rows < 2 * enough:
        raise BilevelError(
            f"{table.path} has {counted(rows, 'usable row')}, too few for --cv {settings.cv}, which needs "
            f"{2 * enough}. Add rows, or write fewer folds."
        )
    if not classes:
        return
    names, counts = np.unique(y.tolist(), return_counts=True)
    rare = [f"{name!r} ({count})" for name, count in zip(names.tolist(), counts, strict=True) if count < enough]
    if rare:
        fewer = "Write fewer folds, or r" if settings.cv > 2 and counts.min() >= rows_needed(2) else "R"
        raise BilevelError(
            f"The target {settings.target!r} has classes with few rows: {', '.join(rare)}. --cv {settings.cv} needs "
            f"{enough} of each. {fewer}emove the rows of these classes."
        )


def rows_needed(folds: int) -> int:
    """The number of rows of each class that nested cross-validation needs, so that every inner fold has one.

    >>> rows_needed(5)
    7
    """
    return next(count for count in range(folds, 10 * folds) if count - np.ceil(count / folds) >= folds)


def _weights(table: DataTable, name: str, rows: NDArray[np.int64]) -> Floats:
    """The weights divided by their mean.

    Another unit of the weights would scale the best penalty, possibly out of the grids of scikit-learn's models.
    """
    column = table.frame[name].iloc[rows]
    weights = numbers_of(column)
    if (bad := ~np.isfinite(weights) | (weights < 0)).any():
        raise BilevelError(f"--weights {name!r} needs a number of at least 0 in every row ({first_of(column, bad)}).")
    if not weights.sum() > 0:
        raise BilevelError(
            f"--weights {name!r} is 0 in all {counted(len(weights), 'row')}. Pass at least one positive weight."
        )
    return weights / weights.mean()
