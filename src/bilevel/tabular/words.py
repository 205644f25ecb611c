"""Names, values and row numbers as messages say them."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from bilevel.errors import BilevelError


def label(value: Any) -> str:
    """A category or class as text: the same for 1, 1.0 and "1", which one column may be read as on different days.

    >>> label(1), label(1.0), label(1.5), label(True), label("yes ")
    ('1', '1', '1.5', 'True', 'yes ')
    """
    if hasattr(value, "item"):
        value = value.item()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def listed(names: Iterable[str], most: int = 12) -> str:
    """
    >>> listed(["a", "b"]), listed("abc", most=2)
    ("'a', 'b'", "'a', 'b' and 1 more")
    """
    every = list(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(map(repr, every[:most])) + more


def dropped(names: Iterable[str], option: str = "--drop") -> str:
    """The options that leave the columns out, ready to paste.

    >>> dropped(["a", "two words"])
    "--drop a --drop 'two words'"
    """
    return " ".join(f"{option} {shlex.quote(name)}" for name in names)


def short(value: Any, width: int = 40) -> str:
    """
    >>> short("x" * 50, 5)
    "'xxxx…'"
    """
    text = str(value)
    return repr(text if len(text) <= width else text[: width - 1] + "…")


def counted(count: int, noun: str) -> str:
    """
    >>> counted(1, "row"), counted(2500, "row")
    ('1 row', '2,500 rows')
    """
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def unknown_column(name: str, option: str, columns: Sequence[str]) -> BilevelError:
    """The error for an option that names a column which the table lacks."""
    near = difflib.get_close_matches(name, columns, 1, 0.6) or [
        other for other in columns if other.strip().lower() == name.strip().lower()
    ]
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return BilevelError(f"{option} {name!r} is not a column of the table.{hint} Its columns: {listed(columns, 30)}.")
