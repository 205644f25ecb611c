"""What keeps a column from being a feature, said with the column, the row and what to write instead."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from bilevel.errors import BilevelError
from bilevel.tabular.values import LARGEST, Mask, Values, decimal_commas
from bilevel.tabular.words import counted, dropped, unknown_column

# A category for every third row or less cannot be learned from; it is a name.
MOST_CATEGORIES = 1 / 3
CALLED = re.compile(r"(^|[^a-z])(id|key|index|uuid)$", re.IGNORECASE)


def check_features(columns: Mapping[str, Values], categorical: Collection[str], one_hot: bool, missing: str) -> None:
    """Refuse a table some of whose columns cannot be features, naming all of them at once.

    >>> from bilevel.tabular.values import look
    >>> check_features({"town": look(["Oslo", "Rome", "Oslo"])}, (), False, "error")
    Traceback (most recent call last):
    bilevel.errors.BilevelError: Column 'town' holds text ('Oslo' in row 1), and the model needs numbers. Write \
--categorical town for an indicator of each of its 2 values (--one-hot does so for every text column), or --drop town.
    """
    found = [problem for name, values in columns.items() if (problem := _problem(name, values, categorical, one_hot))]
    found += _gaps(columns, missing)
    if len(found) == 1:
        raise BilevelError(found[0])
    if found:
        raise BilevelError("Some columns cannot be used as they are:\n" + "\n".join(f"  {one}" for one in found))


def _problem(name: str, values: Values, categorical: Collection[str], one_hot: bool) -> str:
    drop = dropped([name])
    if name.startswith("Unnamed: "):
        return f"A column has no name in the header; a saved row number, perhaps. Name it, or leave it out: {drop}."
    if values.holds == "empty":
        return f"Column {name!r} has no values at all. Leave it out: {drop}."
    if values.holds == "other":
        return f"Column {name!r} holds {values.first(~values.missing)}, which is neither a number nor text. {drop}."
    distinct = values.distinct() if values.holds != "date" else []
    if values.holds != "date" and len(distinct) == 1:
        return f"Column {name!r} is constant (always {distinct[0]!r}) and explains nothing. Leave it out: {drop}."
    if name in categorical or (one_hot and values.holds == "text"):
        return _too_many(name, values, distinct, drop)
    if values.holds == "date":
        return (
            f"Column {name!r} holds dates ({values.first(~values.missing)}), and the model needs numbers. Turn it into "
            f"days since some day, or into columns such as month and weekday; or {drop}."
        )
    if values.holds == "mixed":
        return (
            f"Column {name!r} has text among its numbers: {values.first(values.unreadable)}, in "
            f"{counted(int(values.unreadable.sum()), 'row')}. Mend it or leave the field empty; or {drop}."
        )
    if values.holds == "text":
        return _text(name, values, distinct, drop)
    if np.isinf(values.numbers).any():
        return f"Column {name!r} is infinite ({values.first(np.isinf(values.numbers))}). Mend the value; or {drop}."
    if (large := np.abs(values.numbers) > LARGEST).any():
        return f"Column {name!r} is too large to be squared ({values.first(large)}). Divide it by its size; or {drop}."
    return ""


def _text(name: str, values: Values, distinct: Sequence[str], drop: str) -> str:
    held = values.first(~values.missing)
    if decimal_commas(values):
        return f"Column {name!r} holds numbers with a decimal comma ({held}). Write --decimal ','."
    if problem := _too_many(name, values, distinct, drop):
        return problem
    return (
        f"Column {name!r} holds text ({held}), and the model needs numbers. Write "
        f"{dropped([name], '--categorical')} for an indicator of each of its {len(distinct)} values (--one-hot does so "
        f"for every text column), or {drop}."
    )


def _too_many(name: str, values: Values, distinct: Sequence[str], drop: str) -> str:
    there = int((~values.missing).sum())
    if len(distinct) == there:
        return (
            f"Column {name!r} has another value in every row ({values.first(~values.missing)}): it is a name or a "
            f"number of the row, from which nothing can be learned. Leave it out: {drop}."
        )
    if len(distinct) > max(2.0, MOST_CATEGORIES * there) and there >= 6:
        return (
            f"Column {name!r} has {len(distinct):,} different values in {counted(there, 'row')}, too many for "
            f"indicators. Group them, or leave it out: {drop}."
        )
    return ""


def _gaps(columns: Mapping[str, Values], missing: str) -> list[str]:
    """Empty fields, where they are to be an error; one sentence for all columns."""
    gaps = {
        name: values.missing for name, values in columns.items() if values.missing.any() and values.holds != "empty"
    }
    if not gaps or missing != "error":
        return []
    return [
        f"{_where(gaps)} Write --missing median to fill them in, --missing drop to leave these rows out, or --drop."
    ]


def _where(gaps: Mapping[str, Mask]) -> str:
    told = [
        f"{name!r} ({counted(int(rows.sum()), 'row')}, first row {int(np.flatnonzero(rows)[0]) + 1})"
        for name, rows in list(gaps.items())[:12]
    ]
    more = f" and {len(gaps) - 12} more" if len(gaps) > 12 else ""
    return f"There are empty fields in column{'s' if len(gaps) > 1 else ''} {', '.join(told)}{more}."


def identifiers(columns: Mapping[str, Values]) -> list[str]:
    """A note for every column of numbers that counts the rows, or is called an identifier and differs in every row."""
    notes = []
    for name, values in columns.items():
        numbers = values.numbers
        if values.holds != "number" or len(numbers) < 6 or values.missing.any():
            continue
        counts = bool((np.diff(numbers) == 1).all())
        if counts or (CALLED.search(name) and len(np.unique(numbers)) == len(numbers)):
            why = "counts the rows" if counts else "differs in every row and is called like an identifier"
            notes.append(f"Column {name!r} {why}. If it means nothing, leave it out: {dropped([name])}.")
    return notes


def check_weights(name: str, values: Values) -> None:
    """Sample weights are finite, not negative, and not all zero."""
    bad = values.unreadable | values.missing | ~np.isfinite(values.numbers) | (values.numbers < 0)
    if not values.numeric or bad.any() or not values.numbers.sum() > 0:
        where = f" ({values.first(bad)})" if bad.any() else ""
        raise BilevelError(
            f"--weights {name!r} needs a number of at least 0 in every row, and more than 0 in some{where}."
        )


def check_names(names: Sequence[str], option: str, columns: Sequence[str]) -> None:
    """Refuse an option that names a column which the table lacks."""
    for name in names:
        if name not in columns:
            raise unknown_column(name, option, columns)
