"""The columns of a table as arrays: numbers (NaN if missing), or categories as text (None if missing)."""

from __future__ import annotations

import math
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np
from sklearn.utils import check_array
from sklearn.utils.validation import validate_data

from bilevel.errors import BilevelError
from bilevel.estimators.folds import Array

BOOLEANS = {"True", "False"}
NUMBERS = (Real, Decimal, np.number)
NO_DATES = "Pass numbers instead, such as the year or the days since a date."


def read_columns(estimator: Any, X: Any, categorical: Any, *, reset: bool) -> tuple[list[str], list[Array]]:
    """The names of the columns and their values: float64 for numbers, object for categories.

    Args:
        estimator: stores the names and the number of the columns if `reset`; otherwise they are compared with it.
        categorical: "auto" for the columns that hold text, categories or booleans; or names or positions of further
            columns that hold categories.
        reset: whether this is the table to fit.
    """
    if hasattr(X, "columns") and hasattr(X, "iloc"):
        validate_data(estimator, X, reset=reset, skip_check_array=True)
        check_array(np.zeros(X.shape), ensure_min_samples=2 if reset else 1)
        names = [str(name) for name in X.columns]
        columns = [X.iloc[:, j] for j in range(X.shape[1])]
        arrays = [_from_series(column) for column in columns]
    else:
        if isinstance(X, (list, tuple)) and np.asarray(X).dtype.kind == "U":
            # numpy would turn the numbers of these rows into text.
            X = np.array(X, dtype=object)
        values = validate_data(
            estimator, X, dtype=None, ensure_all_finite="allow-nan", ensure_min_samples=2 if reset else 1, reset=reset
        )
        names = [f"x{j}" for j in range(values.shape[1])]
        arrays = [_from_array(values[:, j]) for j in range(values.shape[1])]
        if reset and values.dtype.kind in "US":
            _refuse_numbers_as_text(arrays, categorical, names)
    if not isinstance(categorical, str) or categorical != "auto":
        for key in np.atleast_1d(np.asarray(categorical, dtype=object)):
            j = position(key, "categorical", names)
            arrays[j] = as_categories(arrays[j])
    numeric = [array for array in arrays if array.dtype == np.float64]
    if numeric:
        # Refuses infinite numbers with scikit-learn's error message.
        check_array(np.column_stack(numeric), ensure_all_finite="allow-nan", estimator=type(estimator).__name__)
    return names, arrays


def _from_series(column: Any) -> Array:
    """The values of a DataFrame's column."""
    kind = getattr(column.dtype, "kind", "O")
    if kind == "c":
        raise ValueError("Complex data not supported")
    if kind in "iuf":
        return np.asarray(column.to_numpy(dtype=np.float64, na_value=np.nan))
    if hasattr(column.dtype, "categories"):
        # Also if they are numbers.
        return as_categories(column)
    if kind in "mM":
        raise BilevelError(f"Column {column.name!r} holds dates. {NO_DATES}")
    return _from_array(np.array([None if _is_missing(value) else value for value in column], dtype=object))


def _from_array(values: Array) -> Array:
    """The values of an array's column: numbers if all present values are numbers, categories otherwise."""
    if values.dtype.kind == "b":
        return as_categories(values.astype(object))
    if values.dtype.kind in "OUS":
        present = [value for value in values if not _is_missing(value)]
        if any(hasattr(value, "isoformat") for value in present):
            raise BilevelError(f"A column of X holds dates. {NO_DATES}")
        if not all(isinstance(value, NUMBERS) and not isinstance(value, bool) for value in present):
            return as_categories(values.astype(object))
        values = np.array([np.nan if _is_missing(value) else value for value in values])
    return np.array(values, dtype=np.float64)


def _refuse_numbers_as_text(arrays: list[Array], categorical: Any, names: list[str]) -> None:
    """Refuse columns of an array of text in which every value is a number, unless they are in `categorical`.

    numpy turns the numbers of an array into text if one of its values is text.
    """
    listed = [] if isinstance(categorical, str) else np.atleast_1d(np.asarray(categorical, dtype=object)).tolist()
    asked = {position(key, "categorical", names) for key in listed}
    for j, array in enumerate(arrays):
        if j not in asked and all(value is None or _is_number(value) or value == "nan" for value in array):
            raise BilevelError(
                f"X is an array of text, and column {names[j]!r} holds numbers as text, such as {array[0]!r}. Pass a "
                f"DataFrame or an array of dtype object; or categorical=[{j}] if the numbers are names of categories."
            )


def as_categories(values: Array) -> Array:
    """Categories as text. Integers have no decimal point, so that 1 and 1.0 are one category."""
    return np.array([None if _is_missing(value) else _text(value) for value in values], dtype=object)


def as_trained(column: Array, levels: Array | None, name: str) -> Array:
    """A column of new rows as the kind that it had in training: categories if `levels` holds any, numbers otherwise."""
    if levels is None:
        try:
            return np.array([np.nan if value is None else float(value) for value in column], dtype=np.float64)
        except ValueError as error:
            raise BilevelError(
                f"Column {name!r} held numbers when the model was fitted, but now it holds text. Pass numbers."
            ) from error
    numbers, column = column.dtype == np.float64, as_categories(column)
    present, known = set(column) - {None}, set(levels.tolist())
    # Text may be a new category. Numbers in place of text, or booleans in place of anything else, are another coding.
    recoded = not any(map(_is_number, known)) if numbers else present <= BOOLEANS
    if present and recoded and not present & known:
        raise BilevelError(
            f"Column {name!r} held categories such as {str(levels[0])!r} when the model was fitted, and now it holds "
            f"{'numbers' if numbers else 'True and False'}, such as {min(present)!r}, which is none of them. Pass the "
            "column as it was in training."
        )
    return _in_single_precision(column, known) if numbers else column


@np.errstate(over="ignore")  # a number beyond single precision is no rounded category
def _in_single_precision(column: Array, known: set[str]) -> Array:
    """Numbers as categories. If one of both tables held single precision, 0.10000000149 is the category 0.1."""
    exact = {float(text): text for text in known if _is_number(text)}
    rounded = {float(np.float32(number)): text for number, text in exact.items()}
    new = set(column) - known - {None}
    same = {text: rounded.get(float(text)) or exact.get(float(np.float32(text))) or text for text in new}
    return np.array([same.get(text, text) for text in column], dtype=object)


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _text(value: Any) -> str:
    is_integer = isinstance(value, (float, np.floating)) and float(value).is_integer()
    return str(int(value)) if is_integer else str(value)


def _is_missing(value: Any) -> bool:
    if value is None:
        return True
    if isinstance(value, (float, np.floating)):
        return bool(np.isnan(value))
    return type(value).__name__ in ("NAType", "NaTType")


def position(key: Any, argument: str, names: list[str], kind: str = "column") -> int:
    """The position of the column or term that an argument gives by its name or its position."""
    named = names.index(str(key)) if str(key) in names else None
    if isinstance(key, (int, np.integer)) and not isinstance(key, bool) and 0 <= key < len(names):
        if named not in (None, key):
            raise BilevelError(
                f"{key!r} in {argument}= is the name of one {kind} and the position of another. Pass the name as text, "
                f"{str(key)!r}."
            )
        return int(key)
    if named is not None:
        return named
    raise BilevelError(f"{key!r} in {argument}= is not a {kind}. The {kind}s are {', '.join(names[:20])}.")
