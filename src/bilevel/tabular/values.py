"""The kind of a column's values, and the values as numbers or as text."""

from __future__ import annotations

import re
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bilevel import extras
from bilevel.tabular.formatting import short

ColumnKind = Literal["number", "boolean", "text", "mixed", "date", "empty", "other"]
DATE = re.compile(r"\s*(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4})([ T]\d{1,2}:\d{2}.*)?\s*")
COMMA = re.compile(r"\s*[+-]?\d+(,\d+)?\s*")
POINTS = re.compile(r"\s*[+-]?\d{1,3}(\.\d{3})*(,\d+)?\s*")
THOUSANDS = re.compile(r"\s*[+-]?\d{1,3}(,\d{3})*(\.\d+)?\s*")
PERCENT = re.compile(r"\s*[+-]?\d+([.,]\d+)?\s*%\s*")
# A percentage with a comma that may be a decimal mark or separate thousands.
UNCLEAR_PERCENT = re.compile(r"\s*[+-]?\d{1,3}(,\d{3})+\s*%\s*")
# A number with a currency or a unit: the parts before and after it must be the same in all values of a column.
WITH_UNIT = re.compile(r"\s*(?P<before>[^\W\d_]{0,3}[$€£¥₹]|)\s*[+-]?\d[\d.,]*\s*(?P<after>[$€£¥₹]|[^\W\d_]{1,6}|)\s*")
SAMPLE = 200  # the kind of a text column is determined from this number of values
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


def kind_of(column: Any) -> ColumnKind:
    """The kind of a pandas Series. "mixed" is numbers with some text, "other" are values such as lists.

    >>> import pandas as pd
    >>> [kind_of(pd.Series(values)) for values in ([1, None], ["1", "2", "x"], ["2020-01-31"], [True, None], ["7%"])]
    ['number', 'mixed', 'date', 'boolean', 'number']
    """
    types = extras.load("pandas", extra="table", purpose="Reading a table").api.types
    present = column.dropna()
    if not len(present):
        return "empty"
    if types.is_datetime64_any_dtype(column.dtype) or types.is_timedelta64_dtype(column.dtype):
        return "date"
    values = present.to_numpy(dtype=object)
    if types.is_bool_dtype(column.dtype) or all(isinstance(value, (bool, np.bool_)) for value in values):
        return "boolean"
    if types.is_complex_dtype(column.dtype) or not all(np.ndim(value) == 0 for value in values[:1000]):
        return "other"
    readable = int(np.count_nonzero(~np.isnan(numbers_of(present))))
    if readable == len(present):
        return "number"
    if hasattr(values[0], "isoformat") or _all_match(DATE, values):
        return "date"
    return "mixed" if 2 * readable > len(present) else "text"


def numbers_of(column: Any) -> Floats:
    """The values as numbers; NaN for other values. If most values are percentages, 7 % is 7, and values without the
    sign become NaN, as 1,200 % does."""
    pandas = extras.load("pandas", extra="table", purpose="Reading a table")
    if isinstance(column.dtype, pandas.CategoricalDtype):
        column = column.astype(column.dtype.categories.dtype)
    if not pandas.api.types.is_numeric_dtype(column.dtype):
        text = column.astype(object).map(str)
        percent = text.str.fullmatch(PERCENT.pattern) & column.notna()
        if 2 * percent.sum() > column.notna().sum():
            unclear = text.str.fullmatch(UNCLEAR_PERCENT.pattern)
            column = text.str.rstrip("% ").str.replace(",", ".").where(percent & ~unclear)
    return pandas.to_numeric(column, errors="coerce").to_numpy(dtype=float, na_value=np.nan)


def labels_of(column: Any) -> NDArray[Any]:
    """The values as text; NaN for empty fields.

    1, 1.0 and "1" become the same text, because a column may be read as integers from one file and as floats or text
    from another.

    >>> import pandas as pd
    >>> labels_of(pd.Series([1.0, 1.5, None, True, "yes "], dtype=object)).tolist()
    ['1', '1.5', nan, 'True', 'yes ']
    """
    labels = [np.nan if empty else _label(value) for value, empty in zip(column, column.isna(), strict=True)]
    return np.array(labels, dtype=object)


def _label(value: Any) -> str:
    value = value.item() if hasattr(value, "item") else value
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def distinct_labels(column: Any) -> list[str]:
    """The different values as text, in alphabetical order."""
    return sorted({_label(value) for value in column.dropna().unique()})


def first_row(column: Any, rows: Any) -> Any:
    """The number of the first of these rows, for a message. Rows are numbered from 1, the index from 0."""
    row = column.index[np.argmax(rows)]
    return row + 1 if isinstance(row, (int, np.integer)) else row


def first_of(column: Any, rows: Any) -> str:
    """The first of these rows and its value, for a message.

    >>> import pandas as pd
    >>> first_of(pd.Series(["a", "b"]), np.array([False, True]))
    "'b' in row 2"
    """
    return f"{short(column.iloc[np.argmax(rows)])} in row {first_row(column, rows)}"


def comma_advice(column: Any) -> str:
    """What to write if the text values are numbers with commas; otherwise ""."""
    values = column.dropna().to_numpy(dtype=object)
    if not any("," in str(value) for value in values):
        return ""
    if _all_match(THOUSANDS, values):
        point = any("." in str(value) for value in values)
        return "Write --thousands ','" + ("" if point else ", or --decimal ',' if the comma is a decimal mark")
    if _all_match(COMMA, values):
        return "Write --decimal ','"
    return "Write --decimal ',' --thousands '.'" if _all_match(POINTS, values) else ""


def unclear_percentages(column: Any) -> Mask:
    """A mask of percentages with a comma that may be a decimal mark or separate thousands.

    >>> import pandas as pd
    >>> unclear_percentages(pd.Series(["1,200%", "7,5%", None, "85%"])).tolist()
    [True, False, False, False]
    """
    return np.array([UNCLEAR_PERCENT.fullmatch(str(value)) is not None for value in column])


def unit_of(column: Any) -> str:
    """The currency or unit that all text values have around a number; otherwise "".

    >>> import pandas as pd
    >>> [unit_of(pd.Series(values)) for values in (["$1,200.50", "$7"], ["3 km", "12 km"], ["3 km", "3 m"])]
    ['$', 'km', '']
    """
    found = [WITH_UNIT.fullmatch(str(value)) for value in column.dropna().to_numpy(dtype=object)[:SAMPLE]]
    units = {(one["before"], one["after"]) if one else ("", "") for one in found}
    return " and ".join(filter(None, units.pop())) if len(units) == 1 else ""


def _all_match(pattern: re.Pattern[str], values: NDArray[Any]) -> bool:
    return all(pattern.fullmatch(str(value)) for value in values[:SAMPLE])
