"""Constraint sets Λ: one file each."""

from __future__ import annotations

import sys
from typing import Any

from bilevel import discovery
from bilevel.constraints.base import Constraint
from bilevel.constraints.per_leaf import PerLeaf
from bilevel.errors import BilevelError


def find() -> dict[str, type[Constraint]]:
    """Every constraint in this folder, by name."""
    return discovery.classes(sys.modules[__name__], Constraint)  # type: ignore[type-abstract]


def as_constraint(constraint: Any) -> Constraint | None:
    """`constraint` as a `Constraint`: a tree of constraints becomes a `PerLeaf`, None stays None."""
    if constraint is None or isinstance(constraint, Constraint):
        return constraint
    if isinstance(constraint, (dict, list, tuple)):
        return PerLeaf(constraint)
    raise BilevelError(
        f"constraint={constraint!r} is not a constraint. Pass one such as Box(-6, 6), or a dict of them with λ's keys."
    )


__all__ = ["Constraint", "as_constraint", "find"]
