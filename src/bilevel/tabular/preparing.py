"""From a table to numbers: which rows and columns are used, the split, and the features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bilevel.errors import BilevelError
from bilevel.tabular.checking import check_features, check_names, check_weights, identifiers
from bilevel.tabular.columns import Column, encode, learn
from bilevel.tabular.reading import Table
from bilevel.tabular.settings import TuneSettings
from bilevel.tabular.target import Model, Target, choose, read_target
from bilevel.tabular.values import Floats, Mask, Values, look
from bilevel.tabular.words import counted, listed


@dataclass(frozen=True)
class Prepared:
    """The numbers of a table. Rows are those in use, in the file's order.

    Args:
        model: the chosen one.
        reason: why, where it was not given.
        target: what is predicted.
        columns: how columns become features.
        features: rows × features, as in the table.
        y: numbers, or places of classes.
        weights: of the rows, if any; 1 on average over the training rows.
        rows: the numbers of the rows in the file, from 1.
        train: the rows that fits may see.
        mean, scale: of the features over the training rows.
        used: the features that vary there.
        notes: what was done on the way.
    """

    model: Model
    reason: str
    target: Target
    columns: tuple[Column, ...]
    features: Floats
    y: NDArray[Any]
    weights: Floats | None
    rows: NDArray[np.int64]
    train: Mask
    mean: Floats
    scale: Floats
    used: Mask
    notes: tuple[str, ...]

    @property
    def test(self) -> Mask:
        return ~self.train

    @property
    def names(self) -> list[str]:
        return [feature for column in self.columns for feature in column.features]

    def standardised(self, rows: Mask) -> Floats:
        return (self.features[rows] - self.mean) / self.scale

    def folds(self, settings: TuneSettings) -> Any:
        """The folds that every model is tuned on."""
        from sklearn.model_selection import KFold, StratifiedKFold

        kind = StratifiedKFold if self.target.classes else KFold
        return kind(settings.cv, shuffle=True, random_state=settings.seed)


def prepare(table: Table, settings: TuneSettings) -> Prepared:
    """Check the table and turn it into numbers; what was learned on the way is learned from training rows only."""
    named = _used_columns(table, settings)
    goal = look(table.frame[settings.target])
    model, reason = (settings.model, "") if settings.model else choose(settings.target, goal)
    target = read_target(settings.target, goal, model)
    categorical = {
        name
        for name, values in named.items()
        if name in settings.categorical or (settings.one_hot and values.holds == "text")
    }
    check_features(named, settings.categorical, settings.one_hot, settings.missing)
    keep, notes = _kept_rows(table, settings, named, goal)
    weights = None
    if settings.weights is not None:
        given = look(table.frame[settings.weights])
        check_weights(settings.weights, given)
        weights = given.numbers[keep]
    y = target.encode(goal)[keep]
    train = _split(table, settings, target, y)
    if weights is not None:
        weights = _in_rows(str(settings.weights), weights, train)
        notes.append(f"The weights {settings.weights!r} are divided by their mean over the training rows.")
    in_training = np.zeros(len(keep), dtype=bool)
    in_training[np.flatnonzero(keep)[train]] = True
    fill = settings.missing == "median"
    columns = tuple(learn(name, values, in_training, name in categorical, fill) for name, values in named.items())
    # The whole table is encoded, so that notes count its rows as the file does.
    encoded, said = encode(table.frame, columns, table.path.name, gaps=True)
    features = encoded[keep]
    mean, scale = features[train].mean(0), features[train].std(0)
    # What is left of a constant's deviation is rounding.
    used = scale > 1e-12 * np.maximum(np.abs(mean), 1e-300)
    names = [feature for column in columns for feature in column.features]
    if not used.any():
        raise BilevelError(f"No column of {table.path} varies over the training rows; try another --seed or more rows.")
    if not used.all():
        flat = [name for name, varies in zip(names, used, strict=True) if not varies]
        said.append(f"Constant over the training rows, and so without a coefficient: {listed(flat)}.")
    return Prepared(
        model,
        reason,
        target,
        columns,
        features,
        y,
        weights,
        np.flatnonzero(keep) + 1,
        train,
        mean,
        np.where(used, scale, 1.0),
        used,
        (*notes, *identifiers(named), *said),
    )


def _used_columns(table: Table, settings: TuneSettings) -> dict[str, Values]:
    check_names([settings.target], "--target", table.columns)
    check_names(settings.drop, "--drop", table.columns)
    check_names(settings.categorical, "--categorical", table.columns)
    check_names([settings.weights] if settings.weights else [], "--weights", table.columns)
    left_out = {settings.target, settings.weights, *settings.drop}
    for name in settings.categorical:
        if name in left_out:
            raise BilevelError(f"--categorical {name!r} is not a feature: it is the target, the weights, or dropped.")
    names = [name for name in table.columns if name not in left_out]
    if not names:
        raise BilevelError(
            f"{table.path} has no column left to predict {settings.target!r} from; it was read with the columns "
            f"{listed(table.columns)}." + (" Is --separator right?" if table.kind == "CSV" else "")
        )
    return {name: look(table.frame[name]) for name in names}


def _kept_rows(
    table: Table, settings: TuneSettings, columns: dict[str, Values], goal: Values
) -> tuple[Mask, list[str]]:
    keep = ~goal.missing
    if not keep.all() and settings.missing == "error":
        raise BilevelError(
            f"The target {settings.target!r} has no value in {counted(int((~keep).sum()), 'row')}, first in row "
            f"{int(np.flatnonzero(~keep)[0]) + 1}. Write --missing drop to leave such rows out. (Fields like NA, NaN, "
            "None and null count as empty.)"
        )
    notes = []
    if not keep.all():
        notes.append(f"Left out {counted(int((~keep).sum()), 'row')} without a target.")
    if settings.missing == "drop":
        empty = np.any([values.missing for values in columns.values()], axis=0) & keep
        if empty.any():
            whose = [name for name, values in columns.items() if (values.missing & keep).any()]
            notes.append(f"Left out {counted(int(empty.sum()), 'row')} with empty fields in {listed(whose)}.")
        keep = keep & ~empty
    return keep, notes


def _split(table: Table, settings: TuneSettings, target: Target, y: NDArray[Any]) -> Mask:
    """The training rows; with classes, each of them is split."""
    from sklearn.model_selection import train_test_split

    rows = len(y)
    held_out = int(np.ceil(settings.test * rows))
    if rows - held_out < 2 * settings.cv or held_out < 2:
        needed = next(n for n in range(4, 10**9) if n - np.ceil(settings.test * n) >= 2 * settings.cv)
        raise BilevelError(
            f"{table.path} has {counted(rows, 'usable row')}, too few for --test {settings.test:g} and --cv "
            f"{settings.cv}, which need {max(needed, int(np.ceil(2 / settings.test)))}: two for each fold and "
            "two to test on. Bring more rows, or write fewer folds or another share."
        )
    if target.classes:
        _check_classes(settings, target, y)
    chosen, _ = train_test_split(
        np.arange(rows),
        test_size=held_out,
        random_state=settings.seed,
        stratify=y if target.classes else None,
    )
    train = np.zeros(rows, dtype=bool)
    train[chosen] = True
    if not target.classes and np.ptp(y[train]) == 0:
        raise BilevelError(
            f"The target {target.name!r} is constant over the training rows; bring more rows or another --seed."
        )
    return train


def _in_rows(name: str, weights: Floats, train: Mask) -> Floats:
    """The weights with a mean of 1 over the training rows: in another unit they would move every penalty, and the best
    one out of the range that the grids of scikit-learn's models search."""
    for rows, what in ((train, "training"), (~train, "test")):
        if not weights[rows].sum() > 0:
            raise BilevelError(
                f"--weights {name!r} is 0 in all {counted(int(rows.sum()), f'{what} row')}; bring more rows with a "
                "positive weight, or write another --seed."
            )
    return weights / weights[train].mean()


def _check_classes(settings: TuneSettings, target: Target, y: NDArray[Any]) -> None:
    counts = np.bincount(y, minlength=len(target.classes))
    needed = int(np.ceil(settings.cv / (1 - settings.test))) + 1
    if len(y) * settings.test < len(target.classes):
        raise BilevelError(
            f"--test {settings.test:g} of {len(y)} rows is less than a row for each of {len(target.classes)} classes."
        )
    rare = {name: int(count) for name, count in zip(target.classes, counts, strict=True) if count < needed}
    if rare:
        told = ", ".join(f"{name!r} ({count})" for name, count in list(rare.items())[:8])
        raise BilevelError(
            f"The target {target.name!r} has classes with few rows: {told}. --cv {settings.cv} and --test "
            f"{settings.test:g} need {needed} of each. Write fewer folds, or leave these rows out."
        )
