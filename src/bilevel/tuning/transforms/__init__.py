"""Transforms of hyperparameters: one file each, found by their word."""

from __future__ import annotations

import sys
from typing import Any

from bilevel import discovery
from bilevel.errors import BilevelError
from bilevel.tuning.transforms.base import Transform


def find() -> dict[str | None, type[Transform]]:
    """Every transform in this folder, by the word that asks for it; None asks for none."""
    found = discovery.classes(sys.modules[__name__], Transform)  # type: ignore[type-abstract]
    return {kind.word: kind for kind in found.values()}


def as_transform(name: str, word: Any, ends: Any) -> Transform:
    """The transform that hyperparameter `name` asks for, over its range."""
    if isinstance(word, Transform):
        if ends is not None:
            raise BilevelError(
                f"Hyperparameter {name!r} has range={ends} and transform={word}, which has a range of its own. Leave "
                "the range out."
            )
        return word
    known = find()
    if word not in known:
        words = ", ".join(sorted(repr(w) for w in known if w))
        raise BilevelError(
            f"Hyperparameter {name!r} has transform={word!r}, which is not known. Pass one of {words}, or None."
        )
    low, high = _ends(name, ends)
    transform = known[word](low, high)
    wrong = transform.check()
    if wrong:
        raise BilevelError(f"Hyperparameter {name!r} has range={ends} with transform={word!r}: {wrong}.")
    return transform


def _ends(name: str, ends: Any) -> tuple[float | None, float | None]:
    if ends is None:
        return None, None
    try:
        low, high = (None if end is None else float(end) for end in ends)
    except (TypeError, ValueError):
        raise BilevelError(
            f"Hyperparameter {name!r} has range={ends!r}; pass a pair (low, high), with None for an open end."
        ) from None
    if low is not None and high is not None and not low < high:
        raise BilevelError(f"Hyperparameter {name!r} has the empty range {ends}; pass low < high.")
    return low, high


__all__ = ["Transform", "as_transform", "find"]
