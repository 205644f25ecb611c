"""Packages that only tables need, which come with the extra `table`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from bilevel.errors import BilevelError


def package(name: str, purpose: str) -> Any:
    """The package, or an error that says how to get it.

    >>> package("json", "this").dumps([1])
    '[1]'
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise BilevelError(
            f"{purpose} needs the package {name}, which is not installed. Write: pip install 'bilevel[table]'"
        ) from error
