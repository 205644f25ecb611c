"""Linear solvers (matvec, b) → x for the implicit methods: one file each."""

from __future__ import annotations

import sys

from bilevel import discovery
from bilevel.linear_solvers.base import LinearSolution, LinearSolver, Operator


def find() -> dict[str, type[LinearSolver]]:
    """Every solver in this folder, by name."""
    return discovery.classes(sys.modules[__name__], LinearSolver)  # type: ignore[type-abstract]


__all__ = ["LinearSolution", "LinearSolver", "Operator", "find"]
