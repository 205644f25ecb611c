"""What is to be predicted: a number or one of several classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bilevel.errors import BilevelError
from bilevel.tabular.values import LARGEST, Values, decimal_commas
from bilevel.tabular.words import counted, listed

Model = Literal["ridge", "elastic-net", "logistic"]
MODELS: tuple[Model, ...] = ("ridge", "elastic-net", "logistic")
MOST_CLASSES = 50


@dataclass(frozen=True)
class Target:
    """The column to be predicted.

    Args:
        name: in the table.
        classes: its values in order, as text; none where it is a number.
    """

    name: str
    classes: tuple[str, ...] = ()

    def encode(self, values: Values) -> NDArray[Any]:
        """Numbers, or the place of every row's class; rows without a known value are NaN, or −1."""
        if not self.classes:
            return values.numbers
        place = {value: index for index, value in enumerate(self.classes)}
        return np.array([place.get(value, -1) for value in values.labels()], dtype=int)


def choose(name: str, values: Values) -> tuple[Model, str]:
    """The model for a target, and why.

    >>> from bilevel.tabular.values import look
    >>> choose("price", look([1.5, 2.5, 9.0]))
    ('ridge', "'price' holds numbers")
    >>> choose("ill", look(["no", "yes", "no"]))
    ('logistic', "'ill' holds text, 2 classes")
    """
    if values.holds == "text":
        return "logistic", f"{name!r} holds text, {len(values.distinct())} classes"
    if values.holds == "boolean" or (values.holds == "number" and len(values.distinct()) == 2):
        return "logistic", f"{name!r} has two values"
    return "ridge", f"{name!r} holds numbers"


def read_target(name: str, values: Values, model: Model) -> Target:
    """The target as the model needs it, or an error that names what is wrong with it."""
    if values.holds == "empty":
        raise BilevelError(f"The target {name!r} has no values at all.")
    if values.holds in ("date", "other"):
        what = "dates" if values.holds == "date" else "neither numbers nor text"
        raise BilevelError(
            f"The target {name!r} holds {what} ({values.first(~values.missing)}); a number or a class is needed."
        )
    if values.holds == "text" and decimal_commas(values):
        raise BilevelError(
            f"The target {name!r} holds numbers with a decimal comma ({values.first(~values.missing)}). "
            "Write --decimal ','."
        )
    if values.holds == "mixed":
        raise BilevelError(
            f"The target {name!r} has text among its numbers: {values.first(values.unreadable)}, in "
            f"{counted(int(values.unreadable.sum()), 'row')}. Mend it, or empty the field and write --missing drop."
        )
    if values.numeric and np.isinf(values.numbers).any():
        raise BilevelError(f"The target {name!r} is infinite: {values.first(np.isinf(values.numbers))}.")
    if values.numeric and (large := np.abs(values.numbers) > LARGEST).any():
        raise BilevelError(f"The target {name!r} is too large to be squared: {values.first(large)}. Divide it.")
    distinct = values.distinct()
    if len(distinct) == 1:
        what = "class" if model == "logistic" else "value"
        raise BilevelError(f"The target {name!r} has a single {what}, {distinct[0]!r}: there is nothing to learn.")
    if model == "logistic":
        return _classes(name, values, distinct)
    if not values.numeric:
        raise BilevelError(
            f"--model {model} predicts numbers, and the target {name!r} holds text ({values.first(~values.missing)}). "
            "Write --model logistic."
        )
    return Target(name)


def _classes(name: str, values: Values, distinct: list[str]) -> Target:
    rows = int((~values.missing).sum())
    if len(distinct) > min(MOST_CLASSES, max(2, rows // 3)):
        advice = "Write --model ridge to predict it as a number." if values.numeric else "Is it the right column?"
        raise BilevelError(
            f"The target {name!r} has {len(distinct):,} different values in {counted(rows, 'row')} "
            f"({listed(distinct, 3)}), too many for classes. {advice}"
        )
    return Target(name, tuple(distinct))
