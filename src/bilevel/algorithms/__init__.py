"""Algorithms that drive the outer problem: one file each."""

from __future__ import annotations

import sys

from bilevel import discovery
from bilevel.algorithms.base import Algorithm, OuterProblem


def find() -> dict[str, type[Algorithm]]:
    """Every algorithm in this folder, by name."""
    return discovery.classes(sys.modules[__name__], Algorithm)  # type: ignore[type-abstract]


__all__ = ["Algorithm", "OuterProblem", "find"]
