"""`--set key=value`: text into typed settings, with errors that name the legal values."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from bilevel.errors import BilevelError
from bilevel.experiments import did_you_mean

BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def pairs(options: Sequence[str]) -> dict[str, str]:
    """The options `key=value` as a dict; the last of two with the same key counts.

    >>> pairs(["seeds=3", "steps=10,50"])
    {'seeds': '3', 'steps': '10,50'}
    """
    found = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or not key.strip():
            raise BilevelError(f"--set {option!r} is not of the form key=value, for example --set iterations=100.")
        found[key.strip()] = value.strip()
    return found


def apply(kind: type[Any], quick: Mapping[str, Any], overrides: Mapping[str, str]) -> tuple[Any, dict[str, str]]:
    """`kind` with the quick settings and then the overrides; also those overrides that change something, as normalised
    text."""
    hints = get_type_hints(kind)
    before = replace(kind(), **quick)
    changed = {}
    for key, text in overrides.items():
        if key not in hints:
            known = "\n".join(
                f"  {f.name}={as_text(getattr(kind(), f.name))}  ({describe(hints[f.name])})" for f in fields(kind)
            )
            raise BilevelError(
                f"There is no setting {key!r}.{did_you_mean(key, hints)} The settings and their defaults are:\n{known}"
            )
        try:
            changed[key] = parse(text, hints[key])
        except ValueError as error:
            reason = f" ({error})" if isinstance(error, BilevelError) else ""
            raise BilevelError(
                f"--set {key}={text}: {key} is {describe(hints[key])}, and {text!r} is not{reason}. Its default is "
                f"{key}={as_text(getattr(kind(), key))}."
            ) from error
    given = {key: as_text(value) for key, value in changed.items() if value != getattr(before, key)}
    return replace(before, **changed), given


def parse(text: str, hint: Any) -> Any:
    """The value of type `hint` that the text stands for; a ValueError if there is none.

    >>> parse("10,50", tuple[int, ...]), parse("1e-3", float), parse("no", bool), parse("none", int | None)
    ((10, 50), 0.001, False, None)
    """
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        if text.lower() == "none" and type(None) in get_args(hint):
            return None
        return parse(text, next(member for member in get_args(hint) if member is not type(None)))
    if origin is Literal:
        if text not in get_args(hint):
            raise ValueError(text)
        return text
    if origin is tuple:
        return tuple(parse(part.strip(), get_args(hint)[0]) for part in text.strip("()[] ").split(",") if part.strip())
    if hint is bool:
        if text.lower() not in BOOLEANS:
            raise ValueError(text)
        return BOOLEANS[text.lower()]
    return hint(text)


def describe(hint: Any) -> str:
    """A description of a type, for messages.

    >>> describe(tuple[int, ...])
    'whole numbers separated by commas, such as 10,50,100'
    """
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return f"{describe(next(m for m in get_args(hint) if m is not type(None)))}, or none"
    if origin is Literal:
        return "one of " + ", ".join(get_args(hint))
    if origin is tuple:
        example = {int: "10,50,100", float: "0.1,0.5"}.get(get_args(hint)[0], "a,b")
        plural = {int: "whole numbers", float: "numbers"}.get(get_args(hint)[0], "words")
        return f"{plural} separated by commas, such as {example}"
    return {
        int: "a whole number (int)",
        float: "a number (float)",
        bool: "true or false (bool)",
        str: "a word (str)",
    }.get(hint, str(hint))


def as_text(value: Any) -> str:
    """A value as `--set` would take it."""
    if isinstance(value, tuple):
        return ",".join(as_text(item) for item in value)
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return str(value)


def as_options(given: Mapping[str, str]) -> list[str]:
    """The overrides as arguments of a shell command; the seed has an option of its own."""
    return [
        f"--seed {text}" if key == "seed" else f"--set {shlex.quote(f'{key}={text}')}" for key, text in given.items()
    ]
