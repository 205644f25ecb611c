"""Different constraints for different parts of λ."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from typing_extensions import Self

from bilevel.constraints.base import Constraint
from bilevel.constraints.box import Box
from bilevel.constraints.simplex import Simplex
from bilevel.errors import BilevelError
from bilevel.trees import Tree


@dataclass(frozen=True)
class PerLeaf(Constraint):
    """Λ as a product: `PerLeaf({"lr": Box(-9, 0), "mix": Simplex()})`.

    A constraint may apply to a whole subtree of λ. None, or a missing key, leaves that part free. A plain dict, list or
    tuple is accepted wherever a constraint is.
    """

    # A dict cannot be hashed.
    parts: Any = field(hash=False)

    def project(self, lam: Tree) -> Tree:
        return _project(self.parts, lam, "")

    @classmethod
    def examples(cls) -> list[tuple[Self, Tree]]:
        vector = torch.zeros(4, dtype=torch.float64)
        return [(cls({"a": Box(-1, 1), "b": Simplex(), "c": None}), {"a": vector, "b": vector, "c": vector})]


def _project(part: Any, lam: Tree, path: str) -> Tree:
    if part is None:
        return lam
    if isinstance(part, Constraint):
        return part.project(lam)
    if isinstance(part, dict) and isinstance(lam, dict):
        unknown = sorted(set(part) - set(lam), key=str)
        if unknown:
            raise BilevelError(
                f"The constraint names λ{path}[{unknown[0]!r}], but λ{path} has only the keys {sorted(lam, key=str)}."
            )
        return type(lam)((key, _project(part.get(key), value, f"{path}[{key!r}]")) for key, value in lam.items())
    if isinstance(part, (list, tuple)) and isinstance(lam, (list, tuple)) and len(part) == len(lam):
        items = [_project(p, x, f"{path}[{i}]") for i, (p, x) in enumerate(zip(part, lam, strict=True))]
        return type(lam)(*items) if hasattr(lam, "_fields") else type(lam)(items)
    raise BilevelError(
        f"The constraint for λ{path} is {type(part).__name__}, which does not fit a {type(lam).__name__} there. Pass a "
        "Constraint or None."
    )
