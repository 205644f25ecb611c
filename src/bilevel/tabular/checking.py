"""Which columns can be features or the target, and messages with the column, the row and what to write instead."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from bilevel.errors import BilevelError
from bilevel.tabular.columns import FeatureKind
from bilevel.tabular.dates import as_days, date_order
from bilevel.tabular.settings import TuneSettings
from bilevel.tabular.values import ColumnKind, comma_advice, distinct_labels, first_of, first_row, kind_of, numbers_of
from bilevel.tabular.words import counted, listed, option

# With more categories than this share of the rows, too few rows are left to learn each of them from.
MOST_CATEGORIES = 1 / 3
# Names such as id, flat_id, userId, "Order ID" and index, but not heat_index.
IDENTIFIER = re.compile(r"(^|[^A-Za-z])(id|Id|ID|key|Key|uuid|UUID)$|[a-z](Id|ID)$|^(index|Index)$")
MOST_CLASSES = 50
LARGEST = 1e100  # sums of squares of larger numbers overflow


def feature_kinds(frame: Any, settings: TuneSettings) -> tuple[dict[str, FeatureKind], list[str]]:
    """The columns that become features and how, and a note for every column that is left out or looks odd.

    A column from which nothing can be learned is left out. Columns that cannot be read are refused, all of them at
    once.

    >>> import pandas as pd
    >>> feature_kinds(pd.DataFrame({"town": ["Oslo", "Rome", "Oslo"]}), TuneSettings("price"))
    Traceback (most recent call last):
    bilevel.errors.BilevelError: Column 'town' holds text ('Oslo' in row 1), and the model needs numbers. Write \
--categorical town for indicators of its 2 values (--one-hot does so for every text column), or --drop town.
    """
    kinds: dict[str, FeatureKind] = {}
    notes, problems = [], []
    for name, column in frame.items():
        kind = kind_of(column)
        categorical = name in settings.categorical or (settings.one_hot and kind == "text")
        if reason := _nothing_to_learn(str(name), column, kind):
            notes.append(f"Left out column {name!r}: {reason}.")
        elif problem := _problem(str(name), column, kind, categorical, name in settings.categorical):
            problems.append(problem)
        else:
            kinds[str(name)] = _feature_kind(column, kind, categorical)
            if kind == "number" and len(column) >= 6 and (np.diff(numbers_of(column)) == 1).all():
                notes.append(
                    f"Column {name!r} counts the rows. If it is only a row number, {option('--drop', str(name))}."
                )
    if settings.missing == "error":
        problems += _gaps(frame[list(kinds)])
    if len(problems) == 1:
        raise BilevelError(problems[0])
    if problems:
        raise BilevelError("Some columns cannot be used as they are:\n" + "\n".join(f"  {one}" for one in problems))
    return kinds, notes


def _feature_kind(column: Any, kind: ColumnKind, categorical: bool) -> FeatureKind:
    if categorical:
        return "categories"
    if kind == "date":
        return date_order(column) or "dates"
    return "truth values" if kind == "boolean" else "numbers"


def _nothing_to_learn(name: str, column: Any, kind: ColumnKind) -> str:
    """Why nothing can be learned from the column, or ""."""
    if name.startswith("Unnamed: "):
        return "it has no name in the header, as saved row numbers have"
    if kind == "empty":
        return "it has no values"
    if kind == "other" or (kind in ("text", "mixed") and comma_advice(column)):
        return ""
    count, there = column.nunique(), int(column.notna().sum())
    if count == 1:
        return f"it is constant (always {distinct_labels(column)[0]!r})"
    named = there >= 6 and kind == "number" and IDENTIFIER.search(name)
    if count == there and (kind == "text" or (named and not (numbers_of(column.dropna()) % 1).any())):
        return f"it has another value in every row ({first_of(column, column.notna())}), like a name or an identifier"
    return ""


def _problem(name: str, column: Any, kind: ColumnKind, categorical: bool, asked: bool) -> str:
    drop = option("--drop", name)
    if kind == "date" and not asked:
        return _date_problem(name, column)
    if kind == "other" or not asked:
        if reason := not_a_number(column, kind):
            return f"Column {name!r} {reason}; or write {drop}."
        if kind != "text":
            return ""
    count, there = column.nunique(), int(column.notna().sum())
    if there >= 6 and count > max(2.0, MOST_CATEGORIES * there):
        return (
            f"Column {name!r} has {count:,} different values in {counted(there, 'row')}, too many for indicators. "
            f"Group them, or write {drop}."
        )
    if categorical:
        return ""
    return (
        f"Column {name!r} holds text ({first_of(column, column.notna())}), and the model needs numbers. Write "
        f"{option('--categorical', name)} for indicators of its {count} values (--one-hot does so for every text "
        f"column), or {drop}."
    )


def _date_problem(name: str, column: Any) -> str:
    there, drop = column.notna().to_numpy(dtype=bool), option("--drop", name)
    if date_order(column) is None:
        return (
            f"Column {name!r} holds dates ({first_of(column, there)}), and no value tells whether the day or the month "
            f"comes first. Write them as 2024-03-31; or write {drop}."
        )
    if (bad := np.isnan(as_days(column)) & there).any():
        return f"Column {name!r} holds dates, but {first_of(column, bad)} is none. Correct it; or write {drop}."
    return ""


def not_a_number(column: Any, kind: ColumnKind) -> str:
    """What keeps the column's values from being numbers, and what to do about it; "" for numbers and plain text."""
    there = column.notna().to_numpy(dtype=bool)
    if kind == "other":
        return f"holds {first_of(column, there)}, which is neither a number nor text. Remove it"
    if kind == "date":
        return f"holds dates ({first_of(column, there)}). Turn them into numbers, such as days since some day"
    if kind in ("text", "mixed") and (advice := comma_advice(column)):
        return f"holds numbers with a comma ({first_of(column, there)}). {advice}"
    numbers = numbers_of(column)
    if kind == "mixed":
        other = np.isnan(numbers) & there
        return (
            f"has values of another kind among its numbers: {first_of(column, other)}, in "
            f"{counted(int(other.sum()), 'row')}. Correct them or leave the fields empty"
        )
    if (infinite := np.isinf(numbers)).any():
        return f"is infinite ({first_of(column, infinite)}). Correct the value"
    if (large := np.abs(numbers) > LARGEST).any():
        return f"is too large to be squared ({first_of(column, large)}). Divide it by its size"
    return ""


def _gaps(frame: Any) -> list[str]:
    """One sentence on the empty fields of all columns."""
    found = [
        f"{name!r} ({counted(int(empty.sum()), 'row')}, first row {first_row(frame, empty)})"
        for name, empty in frame.isna().items()
        if empty.any()
    ]
    if not found:
        return []
    more = f" and {len(found) - 12} more" if len(found) > 12 else ""
    return [
        f"There are empty fields in column{'s' * (len(found) > 1)} {', '.join(found[:12])}{more}. Write --missing "
        "median to fill them in, --missing drop to leave these rows out, or --drop."
    ]


def rare_classes(labels: Sequence[str], settings: TuneSettings, needed: int) -> None:
    """Refuse classes with fewer rows than the folds need; all of them are named."""
    names, counts = np.unique(labels, return_counts=True)
    if rare := [f"{name!r} ({count})" for name, count in zip(names.tolist(), counts, strict=True) if count < needed]:
        raise BilevelError(
            f"The target {settings.target!r} has classes with few rows: {', '.join(rare)}. --cv {settings.cv} needs "
            f"{needed} of each. Write fewer folds, or leave them out."
        )


def check_target(column: Any, settings: TuneSettings) -> tuple[bool, str]:
    """Whether the target is classes, and why if that was not asked for. A target that cannot be predicted is refused.

    >>> import pandas as pd
    >>> check_target(pd.Series(["no", "yes", "no"], name="ill"), TuneSettings("ill"))
    (True, "'ill' holds text, 2 classes")
    """
    name, kind, there = column.name, kind_of(column), column.notna().to_numpy(dtype=bool)
    if kind == "empty":
        raise BilevelError(f"The target {name!r} has no values at all.")
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
        raise BilevelError(f"The target {name!r} has a single {what}, {labels[0]!r}: there is nothing to learn.")
    if not classes and kind == "text":
        raise BilevelError(
            f"--model {settings.model} predicts numbers, and the target {name!r} holds text "
            f"({first_of(column, there)}). Write --model logistic."
        )
    if classes and len(labels) > min(MOST_CLASSES, max(2, there.sum() // 3)):
        advice = "Is it the right column?" if kind == "text" else "Write --model ridge to predict it as a number."
        raise BilevelError(
            f"The target {name!r} has {len(labels):,} different values in {counted(int(there.sum()), 'row')} "
            f"({listed(labels, 3)}), too many for classes. {advice}"
        )
    return classes, why
