"""Methods for the hypergradient ∇f_T(λ): one file each, with the same call and the same type of result."""

from __future__ import annotations

import sys

from bilevel import discovery
from bilevel.engine.method import Hypergradient, Method, Stats


def find() -> dict[str, type[Method]]:
    """Every method in this folder, by name."""
    return discovery.classes(sys.modules[__name__], Method)  # type: ignore[type-abstract]


__all__ = ["Hypergradient", "Method", "Stats", "find"]
