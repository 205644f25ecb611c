"""Checks of the columns of a table: which can be features, and whether the target can be predicted."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from bilevel.errors import BilevelError
from bilevel.tabular.columns import FeatureKind
from bilevel.tabular.dates import as_days, date_order
from bilevel.tabular.formatting import counted, listed, option
from bilevel.tabular.settings import TuneSettings
from bilevel.tabular.values import (
    ColumnKind,
    comma_advice,
    distinct_labels,
    first_of,
    first_row,
    kind_of,
    numbers_of,
    unclear_percentages,
    unit_of,
)

# A column may have at most this many categories per row. With more, there are too few rows of each category.
MAX_CATEGORIES = 1 / 3
# Names such as id, flat_id, userId, "Order ID" and index, but not heat_index.
IDENTIFIER = re.compile(r"(^|[^A-Za-z])(id|Id|ID|key|Key|uuid|UUID)$|[a-z](Id|ID)$|^(index|Index)$")
# Columns of these names are left out if they count the rows: row, rownames, row_number, obs_no.
ROW_NUMBER = re.compile(r"row|obs|(row|obs|case|record)[ _.-]?(names?|numbers?|num|nr|no|index)", re.IGNORECASE)
MAX_CLASSES = 50
MAX_NUMBER = 1e100  # sums of squares of larger numbers overflow


def feature_kinds(frame: Any, settings: TuneSettings) -> tuple[dict[str, FeatureKind], list[str]]:
    """The kind of every feature column, and notes on columns that are left out, hold text or look odd.

    A column is left out if nothing can be learned from it. Columns that cannot be used are refused together, in one
    error.

    >>> import pandas as pd
    >>> feature_kinds(pd.DataFrame({"town": ["Oslo", "Rome", "Oslo"]}), TuneSettings("price"))
    ({'town': 'categories'}, ["Column 'town' holds text: its 2 values are categories."])
    """
    kinds: dict[str, FeatureKind] = {}
    notes, problems, texts = [], [], []
    for name, column in frame.items():
        kind = kind_of(column)
        categorical = kind == "text" or name in settings.categorical
        if reason := _nothing_to_learn(str(name), column, kind):
            notes.append(f"Left out column {name!r}: {reason}.")
        elif problem := _problem(str(name), column, kind, categorical, name in settings.categorical):
            problems.append(problem)
        else:
            kinds[str(name)] = _feature_kind(column, kind, categorical)
            if kind == "text" and name not in settings.categorical:
                texts.append(str(name))
            if kind == "number" and _counts_rows(column):
                notes.append(
                    f"Column {name!r} counts the rows. If it is only a row number, {option('--drop', str(name))}."
                )
    notes += _texts(frame[texts])
    if settings.missing == "error":
        problems += _empty_fields(frame[list(kinds)])
    if len(problems) == 1:
        raise BilevelError(problems[0])
    if problems:
        raise BilevelError(
            "Some columns cannot be used as they are:\n" + "\n".join(f"  {problem}" for problem in problems)
        )
    return kinds, notes


def _feature_kind(column: Any, kind: ColumnKind, categorical: bool) -> FeatureKind:
    if categorical:
        return "categories"
    if kind == "date":
        return date_order(column) or "dates"
    return "truth values" if kind == "boolean" else "numbers"


def _counts_rows(column: Any) -> bool:
    return len(column) >= 6 and bool((np.diff(numbers_of(column)) == 1).all())


def _nothing_to_learn(name: str, column: Any, kind: ColumnKind) -> str:
    """The reason why nothing can be learned from the column, or ""."""
    if name.startswith("Unnamed: "):
        return "it has no name in the header, as saved row numbers have"
    if kind == "empty":
        return "it has no values"
    if kind == "other":
        return ""
    if kind in ("text", "mixed") and (comma_advice(column) or unit_of(column) or unclear_percentages(column).any()):
        return ""
    count, present = column.nunique(), int(column.notna().sum())
    if count == 1:
        return f"it is constant (always {distinct_labels(column)[0]!r})"
    if kind == "number" and ROW_NUMBER.fullmatch(name) and numbers_of(column)[0] in (0, 1) and _counts_rows(column):
        return "it counts the rows"
    is_identifier = present >= 6 and kind == "number" and IDENTIFIER.search(name)
    if count == present and (kind == "text" or (is_identifier and not (numbers_of(column.dropna()) % 1).any())):
        return f"it has another value in every row ({first_of(column, column.notna())}), like a name or an identifier"
    return ""


def _problem(name: str, column: Any, kind: ColumnKind, categorical: bool, asked: bool) -> str:
    """Why the column cannot be a feature and what to write instead, or "". `asked`: it is in --categorical."""
    drop = option("--drop", name)
    if kind == "date" and not asked:
        return _date_problem(name, column)
    if kind == "other" or not asked:
        if reason := not_a_number(column, kind):
            return f"Column {name!r} {reason}; or write {drop}."
        if kind != "text":
            return ""
    count, present = column.nunique(), int(column.notna().sum())
    if present >= 6 and count > max(2.0, MAX_CATEGORIES * present):
        if unit := unit_of(column):
            return (
                f"Column {name!r} holds numbers with {unit!r} ({first_of(column, column.notna())}). Remove {unit!r} "
                f"from the values, or write {drop}."
            )
        return (
            f"Column {name!r} has {count:,} different values in {counted(present, 'row')}, too many for indicators. "
            f"Group them, or write {drop}."
        )
    return ""


def _texts(frame: Any) -> list[str]:
    """One sentence on all columns of text."""
    if len(frame.columns) > 1:
        return [f"Columns {listed(frame.columns)} hold text: their values are categories."]
    return [
        f"Column {name!r} holds text: its {column.nunique()} values are categories." for name, column in frame.items()
    ]


def _date_problem(name: str, column: Any) -> str:
    present, drop = column.notna().to_numpy(dtype=bool), option("--drop", name)
    if date_order(column) is None:
        return (
            f"Column {name!r} holds dates ({first_of(column, present)}), and no value tells whether the day or the "
            f"month comes first. Write them as 2024-03-31; or write {drop}."
        )
    if (bad := np.isnan(as_days(column)) & present).any():
        return f"Column {name!r} holds dates, but {first_of(column, bad)} is not a date. Correct it; or write {drop}."
    return ""


def not_a_number(column: Any, kind: ColumnKind) -> str:
    """Why the values are not numbers and what to do about it; "" for numbers and for plain text."""
    present = column.notna().to_numpy(dtype=bool)
    if kind == "other":
        return f"holds {first_of(column, present)}, which is neither a number nor text. Remove it"
    if kind == "date":
        return f"holds dates ({first_of(column, present)}). Turn them into numbers, such as days since some day"
    if kind in ("text", "mixed") and (unclear := unclear_percentages(column)).any():
        return (
            f"holds percentages with a comma that may be a decimal mark or separate thousands "
            f"({first_of(column, unclear)}). Write them as 1200% or 1.2%"
        )
    if kind in ("text", "mixed") and (advice := comma_advice(column)):
        return f"holds numbers with a comma ({first_of(column, present)}). {advice}"
    numbers = numbers_of(column)
    if kind == "mixed":
        other = np.isnan(numbers) & present
        return (
            f"has values of another kind among its numbers: {first_of(column, other)}, in "
            f"{counted(int(other.sum()), 'row')}. Correct them or leave the fields empty"
        )
    if (infinite := np.isinf(numbers)).any():
        return f"is infinite ({first_of(column, infinite)}). Correct the value"
    if (large := np.abs(numbers) > MAX_NUMBER).any():
        return f"is too large to be squared ({first_of(column, large)}). Use a larger unit"
    return ""


def _empty_fields(frame: Any) -> list[str]:
    """One sentence on the empty fields of all columns."""
    columns = [
        f"{name!r} ({counted(int(empty.sum()), 'row')}, first row {first_row(frame, empty)})"
        for name, empty in frame.isna().items()
        if empty.any()
    ]
    if not columns:
        return []
    more = f" and {len(columns) - 12} more" if len(columns) > 12 else ""
    return [
        f"There are empty fields in column{'s' * (len(columns) > 1)} {', '.join(columns[:12])}{more}. Write --missing "
        "median to fill them in (the additive model has an effect of a missing value instead), --missing drop to leave "
        "these rows out, or --drop."
    ]


def check_target(column: Any, settings: TuneSettings) -> tuple[bool, str]:
    """Whether the target is classes, and the reason if no setting says so. A target that cannot be predicted is
    refused.

    >>> import pandas as pd
    >>> check_target(pd.Series(["no", "yes", "no"], name="ill"), TuneSettings("ill"))
    (True, "'ill' holds text, 2 classes")
    """
    name, kind, present = column.name, kind_of(column), column.notna().to_numpy(dtype=bool)
    if kind == "empty":
        raise BilevelError(f"The target {name!r} has no values. Pass the name of another column as --target.")
    if reason := not_a_number(column, kind):
        raise BilevelError(f"The target {name!r} {reason}.")
    labels, why = distinct_labels(column), ""
    if settings.model in ("ridge", "elastic-net"):
        if settings.classes:
            raise BilevelError(f"--model {settings.model} predicts numbers, not --classes. Write --model logistic.")
        classes = False
    elif settings.classes or settings.model == "logistic":
        classes = True
    elif kind == "text":
        classes, why = True, f"{name!r} holds text, {len(labels)} classes"
    elif len(labels) == 2:
        classes, why = True, f"{name!r} has two values"
    else:
        classes, why = False, f"{name!r} holds numbers"
    if len(labels) == 1:
        what = "class" if classes else "value"
        raise BilevelError(
            f"The target {name!r} has a single {what}, {labels[0]!r}: there is nothing to learn. Pass another --target."
        )
    if not classes and kind == "text":
        raise BilevelError(
            f"--model {settings.model} predicts numbers, and the target {name!r} holds text "
            f"({first_of(column, present)}). Write --model logistic."
        )
    if classes and len(labels) > min(MAX_CLASSES, max(2, present.sum() // 3)):
        advice = "Is it the right column?" if kind == "text" else "Write --model ridge to predict it as a number."
        if unit := unit_of(column):
            advice = f"To predict it as a number, remove {unit!r} from the values."
        raise BilevelError(
            f"The target {name!r} has {len(labels):,} different values in {counted(int(present.sum()), 'row')} "
            f"({listed(labels, 3)}), too many for classes. {advice}"
        )
    return classes, why
