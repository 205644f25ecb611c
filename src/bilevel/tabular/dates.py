"""Dates: whether the day or the month comes first, and features of a date."""

from __future__ import annotations

import re
from typing import Any, Literal

import numpy as np

from bilevel import extras
from bilevel.tabular.values import Floats

DateOrder = Literal["dates", "day-first dates", "month-first dates"]
NUMERIC = re.compile(r"\s*(\d{1,2})[-/.](\d{1,2})[-/.]\d{2,4}\b.*")
PARTS = ("days", "month", "weekday", "hour")


def date_order(column: Any) -> DateOrder | None:
    """How dates are written, or None where the values do not tell.

    >>> import pandas as pd
    >>> [date_order(pd.Series(values)) for values in (["2024-03-31"], ["31.3.2024"], ["3/31/2024"], ["3/4/2024"])]
    ['dates', 'day-first dates', 'month-first dates', None]
    """
    found = [NUMERIC.fullmatch(value) for value in column.dropna() if isinstance(value, str)]
    leading = [(int(one[1]), int(one[2])) for one in found if one]
    if not leading:
        return "dates"
    if any(first > 12 for first, _ in leading):
        return "day-first dates"
    return "month-first dates" if any(second > 12 for _, second in leading) else None


def as_days(column: Any, order: DateOrder | None = None) -> Floats:
    """Days since 1970 with fractions; NaN where there is no date.

    >>> import pandas as pd
    >>> as_days(pd.Series(["1970-01-02 12:00", "1971-01-01"])).tolist()
    [1.5, 365.0]
    """
    pandas = extras.load("pandas", extra="table", purpose="Reading a table")
    if pandas.api.types.is_timedelta64_dtype(column.dtype):
        return (column / pandas.Timedelta(days=1)).to_numpy(dtype=float, na_value=np.nan)
    order = order or date_order(column) or "dates"
    try:
        found = pandas.to_datetime(
            column, format="mixed", dayfirst=order == "day-first dates", errors="coerce", utc=True
        )
    except (ValueError, TypeError):  # a mixture that pandas does not parse
        return np.full(len(column), np.nan)
    since = found - pandas.Timestamp(0, tz="UTC")
    return (since / pandas.Timedelta(days=1)).to_numpy(dtype=float, na_value=np.nan)


def calendar(days: Floats) -> Floats:
    """Features of dates: the days themselves, the month, the weekday (Monday is 0) and the hour.

    >>> calendar(np.array([[1.5]])).tolist()
    [[1.5, 1.0, 4.0, 12.0]]
    """
    whole = np.floor(days)
    stamps = whole.astype(np.int64).astype("datetime64[D]")
    month = stamps.astype("datetime64[M]").astype(int) % 12 + 1
    parts = np.stack([days, month, (whole + 3) % 7, np.round(24 * (days - whole), 6)], axis=2)
    return np.asarray(parts.reshape(len(days), -1), dtype=float)


def calendar_names(transformer: Any, names: Any) -> list[str]:
    """The names of a date's features."""
    return [f"{name} ({part})" for name in names for part in PARTS]
