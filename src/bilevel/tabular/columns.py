"""Columns of a table and the features they become, learned from the training rows and applied to any others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from bilevel.errors import BilevelError
from bilevel.tabular.values import Floats, Mask, Values, look
from bilevel.tabular.words import counted, label, listed, short


@dataclass(frozen=True)
class Column:
    """How one column becomes features.

    A number is itself, a truth value 0 or 1, a category an indicator for each value that the training rows have.

    Args:
        name: in the table.
        kind: what it holds.
        categories: the values that have an indicator.
        fill: what stands in for an empty field; None where empty fields are not filled.
    """

    name: str
    kind: Literal["number", "boolean", "categories"]
    categories: tuple[str, ...] = ()
    fill: float | str | None = None

    @property
    def features(self) -> list[str]:
        return [f"{self.name}={value}" for value in self.categories] if self.kind == "categories" else [self.name]

    def plain(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.kind, "categories": list(self.categories), "fill": self.fill}

    @staticmethod
    def of(plain: dict[str, Any]) -> Column:
        return Column(plain["name"], plain["kind"], tuple(plain["categories"]), plain["fill"])


def learn(name: str, values: Values, rows: Mask, categorical: bool, fill: bool) -> Column:
    """The column as its training rows have it; with `fill`, empty fields become the median or the commonest value.

    >>> learn("size", look([1.0, 3.0, 8.0, None]), np.array([True, True, True, False]), False, True)
    Column(name='size', kind='number', categories=(), fill=3.0)
    >>> learn("town", look(["b", "a", "b"]), np.array([True, True, True]), True, False).features
    ['town=a', 'town=b']
    """
    known = rows & ~values.missing
    if categorical:
        seen = values.labels()[known]
        names, counts = np.unique(seen.astype(str), return_counts=True)
        order = [one for one in values.distinct() if one in set(names)]
        return Column(name, "categories", tuple(order), str(names[counts.argmax()]) if fill else None)
    kind: Literal["number", "boolean"] = "boolean" if values.holds == "boolean" else "number"
    middle = float(np.median(values.numbers[known])) if fill and known.any() else None
    # The median of truth values may be a half; the commoner of the two is meant.
    return Column(name, kind, (), middle if middle is None or kind == "number" else float(middle > 0.5))


def encode(frame: Any, columns: Sequence[Column], where: str, *, gaps: bool = False) -> tuple[Floats, list[str]]:
    """The features of every row, columns of a float64 array in the order of `columns`, and notes on what was done.

    Args:
        frame: a DataFrame that has all the columns; others are ignored.
        columns: as learned.
        where: what the frame is called in messages.
        gaps: leave NaN in rows with an empty field that nothing fills, instead of refusing them.
    """
    parts: list[Floats] = []
    notes: list[str] = []
    for column in columns:
        values = look(frame[column.name])
        part, note = _encoded(column, values, where, gaps)
        parts.append(part)
        if note:
            notes.append(note)
        if values.missing.any() and column.fill is not None:
            filled = f"{column.fill:.6g}" if isinstance(column.fill, float) else repr(column.fill)
            notes.append(
                f"Column {column.name!r}: {counted(int(values.missing.sum()), 'empty field')} of {where} filled with "
                f"{filled}, {'the commonest value' if column.kind != 'number' else 'the median'} of the training rows."
            )
    count = len(frame)
    return (np.concatenate(parts, axis=1) if parts else np.empty((count, 0))), notes


def _encoded(column: Column, values: Values, where: str, gaps: bool) -> tuple[Floats, str]:
    if values.missing.any() and column.fill is None and not gaps:
        raise BilevelError(
            f"Column {column.name!r} of {where} has no value in {counted(int(values.missing.sum()), 'row')}, first in "
            f"row {int(np.flatnonzero(values.missing)[0]) + 1}, and the model was trained without empty fields. Fill "
            "them in, or train it with --missing median."
        )
    if column.kind == "categories":
        return _indicators(column, values, where)
    numbers = values.numbers
    if not values.numeric:
        numbers = _truths(values) if column.kind == "boolean" else numbers
        bad = np.isnan(numbers) & ~values.missing
        if bad.any():
            needed = "True or False" if column.kind == "boolean" else "a number"
            raise BilevelError(
                f"Column {column.name!r} of {where}: {values.first(bad)} is not {needed}, which the model needs there."
            )
    if np.isinf(numbers).any():
        raise BilevelError(f"Column {column.name!r} of {where} is infinite: {values.first(np.isinf(numbers))}.")
    if column.kind == "boolean" and not np.isin(numbers[~np.isnan(numbers)], (0, 1)).all():
        bad = ~np.isin(numbers, (0, 1)) & ~np.isnan(numbers)
        raise BilevelError(
            f"Column {column.name!r} of {where}: {values.first(bad)} is not True or False, which the model needs there."
        )
    if column.fill is not None:
        numbers = np.where(values.missing, float(column.fill), numbers)
    return numbers[:, None], ""


def _truths(values: Values) -> Floats:
    words = {"true": 1.0, "false": 0.0, "1": 1.0, "0": 0.0}
    return np.array([words.get(label(value).strip().lower(), np.nan) for value in values.raw])


def _indicators(column: Column, values: Values, where: str) -> tuple[Floats, str]:
    found = values.labels()
    if column.fill is not None:
        found[values.missing] = column.fill
    place = {value: index for index, value in enumerate(column.categories)}
    indices = np.array([-1 if value is None else place.get(value, -1) for value in found], dtype=int)
    part = np.zeros((len(found), len(place)))
    part[np.flatnonzero(indices >= 0), indices[indices >= 0]] = 1
    empty = np.array([value is None for value in found], dtype=bool)
    part[empty] = np.nan
    new = (indices < 0) & ~empty
    if not new.any():
        return part, ""
    row = int(np.flatnonzero(new)[0])
    return part, (
        f"Column {column.name!r}: {counted(int(new.sum()), 'row')} of {where} {'has' if new.sum() == 1 else 'have'} a "
        f"value that the training rows lack ({short(found[row])} in row {row + 1}); all of its indicators are 0 there. "
        f"Known are {listed(column.categories)}."
    )
