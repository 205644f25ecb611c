"""Formatting of names, values and counts in messages."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from bilevel.errors import BilevelError


def listed(names: Iterable[str], most: int = 12) -> str:
    """Names in quotes, separated by commas.

    >>> listed(["a", "b"]), listed("abc", most=2)
    ("'a', 'b'", "'a', 'b' and 1 more")
    """
    every = list(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(map(repr, every[:most])) + more


def option(flag: str, name: str) -> str:
    """An option with a column's name, quoted for the shell.

    >>> option("--drop", "two words")
    "--drop 'two words'"
    """
    return f"{flag} {shlex.quote(name)}"


def short(value: Any, width: int = 40) -> str:
    """A value in quotes, cut to a width.

    >>> short("x" * 50, 5)
    "'xxxx…'"
    """
    text = str(value)
    return repr(text if len(text) <= width else text[: width - 1] + "…")


def counted(count: int, noun: str) -> str:
    """A number with its noun, in the plural if needed.

    >>> counted(1, "row"), counted(2500, "row")
    ('1 row', '2,500 rows')
    """
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def check_names(names: Iterable[str], flag: str, columns: Sequence[str]) -> None:
    """Refuse an option that names a column that is not in the table."""
    for name in names:
        if name not in columns:
            similar = difflib.get_close_matches(name, columns, 1, 0.6) or [
                other for other in columns if other.strip().lower() == name.strip().lower()
            ]
            hint = f" Did you mean {similar[0]!r}?" if similar else ""
            raise BilevelError(
                f"{flag} {name!r} is not a column of the table.{hint} Its columns: {listed(columns, 30)}."
            )
