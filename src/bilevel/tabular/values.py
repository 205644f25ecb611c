"""What a column holds: numbers, truth values, text, dates, and which rows are empty."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bilevel.tabular._packages import package
from bilevel.tabular.words import label, short

Holds = Literal["number", "boolean", "text", "mixed", "date", "empty", "other"]
DATE = re.compile(r"^\s*(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4})([ T]\d{1,2}:\d{2}.*)?\s*$")
COMMA = re.compile(r"^\s*[+-]?\d+,\d+\s*$")
LARGEST = 1e100  # squares of larger numbers add up to infinity
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Values:
    """One column, looked at.

    Args:
        holds: "mixed" is text among numbers, "other" is anything a table should not hold, such as lists.
        numbers: what can be read as a number, NaN elsewhere.
        missing: the rows without a value.
        raw: the values themselves.
    """

    holds: Holds
    numbers: Floats
    missing: Mask
    raw: NDArray[Any]

    @property
    def numeric(self) -> bool:
        return self.holds in ("number", "boolean")

    def labels(self) -> NDArray[Any]:
        """The values as text, None where there is none."""
        return np.array(
            [None if empty else label(value) for value, empty in zip(self.raw, self.missing, strict=True)], dtype=object
        )

    def distinct(self) -> list[str]:
        """The different values as text: numbers by size, words by alphabet."""
        if self.numeric:
            there = np.unique(self.numbers[~self.missing])
            return [label(bool(one)) if self.holds == "boolean" else label(one) for one in there]
        return sorted(set(self.labels()[~self.missing]))

    def first(self, rows: Mask) -> str:
        """The first of the rows and what is in it, as a message says it.

        >>> look(["a", "b"]).first(np.array([False, True]))
        "'b' in row 2"
        """
        row = int(np.flatnonzero(rows)[0])
        return f"{short(self.raw[row])} in row {row + 1}"

    @property
    def unreadable(self) -> Mask:
        """Rows with a value that is no number."""
        return np.isnan(self.numbers) & ~self.missing


def decimal_commas(values: Values) -> bool:
    """Whether text looks like numbers with a decimal comma.

    >>> decimal_commas(look(["1,5", "2,25"])), decimal_commas(look(["1,5", "a"]))
    (True, False)
    """
    return all(COMMA.match(str(value)) for value in values.raw[~values.missing][:200])


def look(column: Any) -> Values:
    """What a column of a table, or a list, holds.

    >>> look([1, 2.5, None]).holds, look(["1", "2", "x"]).holds, look(["2020-01-31"]).holds, look([True, None]).holds
    ('number', 'mixed', 'date', 'boolean')
    """
    pandas = package("pandas", "Reading a table")
    series = pandas.Series(column)
    if isinstance(series.dtype, pandas.CategoricalDtype):
        series = series.astype(series.dtype.categories.dtype)
    missing = series.isna().to_numpy(dtype=bool)
    raw = series.to_numpy(dtype=object)
    nowhere = np.full(len(series), np.nan)
    types = pandas.api.types
    there = raw[~missing]
    if not len(there):
        return Values("empty", nowhere, missing, raw)
    if types.is_datetime64_any_dtype(series.dtype) or types.is_timedelta64_dtype(series.dtype):
        return Values("date", nowhere, missing, raw)
    if all(isinstance(value, (bool, np.bool_)) for value in there):
        numbers = nowhere.copy()
        numbers[~missing] = there.astype(bool)
        return Values("boolean", numbers, missing, raw)
    if types.is_complex_dtype(series.dtype) or not all(np.ndim(value) == 0 for value in there[:1000]):
        return Values("other", nowhere, missing, raw)
    numbers = pandas.to_numeric(series, errors="coerce").to_numpy(dtype=float, na_value=np.nan)
    readable = np.isfinite(numbers) | np.isinf(numbers)
    if (readable | missing).all():
        return Values("number", numbers, missing, raw)
    if hasattr(there[0], "isoformat") or all(DATE.match(str(value)) for value in there[:200]):
        return Values("date", nowhere, missing, raw)
    return Values("mixed" if 2 * readable.sum() > len(there) else "text", numbers, missing, raw)
