"""Dates: the order of day and month, and the features of a date."""

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
    """The order of day and month in text, or None if the values do not determine it.

    >>> import pandas as pd
    >>> [date_order(pd.Series(values)) for values in (["2024-03-31"], ["31.3.2024"], ["3/31/2024"], ["3/4/2024"])]
    ['dates', 'day-first dates', 'month-first dates', None]
    """
    matches = [NUMERIC.fullmatch(value) for value in column.dropna() if isinstance(value, str)]
    leading = [(int(match[1]), int(match[2])) for match in matches if match]
    if not leading:
        return "dates"
    if any(first > 12 for first, _ in leading):
        return "day-first dates"
    return "month-first dates" if any(second > 12 for _, second in leading) else None


def as_days(column: Any, order: DateOrder | None = None) -> Floats:
    """Days since 1970, with fractions; NaN for values that are not dates.

    >>> import pandas as pd
    >>> as_days(pd.Series(["1970-01-02 12:00", "1971-01-01"])).tolist()
    [1.5, 365.0]
    """
    pandas = extras.load("pandas", extra="table", purpose="Reading a table")
    if pandas.api.types.is_timedelta64_dtype(column.dtype):
        return (column / pandas.Timedelta(days=1)).to_numpy(dtype=float, na_value=np.nan)
    order = order or date_order(column) or "dates"
    try:
        dates = pandas.to_datetime(
            column, format="mixed", dayfirst=order == "day-first dates", errors="coerce", utc=True
        )
    except (ValueError, TypeError):  # pandas cannot parse some mixtures of formats
        return np.full(len(column), np.nan)
    since = dates - pandas.Timestamp(0, tz="UTC")
    return (since / pandas.Timedelta(days=1)).to_numpy(dtype=float, na_value=np.nan)


def calendar(days: Floats) -> Floats:
    """Features of dates: the days themselves, the month, the weekday (Monday is 0) and the hour.

    >>> calendar(np.array([[1.5]])).tolist()
    [[1.5, 1.0, 4.0, 12.0]]
    """
    day = np.floor(days)
    stamps = day.astype(np.int64).astype("datetime64[D]")
    month = stamps.astype("datetime64[M]").astype(int) % 12 + 1
    parts = np.stack([days, month, (day + 3) % 7, np.round(24 * (days - day), 6)], axis=2)
    return np.asarray(parts.reshape(len(days), -1), dtype=float)


def calendar_names(transformer: Any, names: Any) -> list[str]:
    """The names of a date's features."""
    return [f"{name} ({part})" for name in names for part in PARTS]
