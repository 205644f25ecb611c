"""The base class of constraint sets Λ."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from bilevel.errors import BilevelError
from bilevel.trees import Tree


@dataclass(frozen=True)
class Constraint(ABC):
    """A closed convex set Λ (assumption (i) of Section 3 asks for a compact one), given by its Euclidean projection.

    `project(lam)` is the point of Λ nearest to λ, a new tree: λ itself is not changed. Points of Λ are mapped to
    themselves.
    """

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        # A subclass with another set has another support function.
        if "project" in vars(cls) and "support" not in vars(cls):
            cls.support = Constraint.support  # type: ignore[method-assign]

    @abstractmethod
    def project(self, lam: Tree) -> Tree:
        """argmin over Λ of ‖· − λ‖."""

    def support(self, direction: Tree) -> Tensor:
        """The support function of Λ: sup ⟨direction, u⟩ over u in Λ. Duality gaps are computed from it."""
        raise BilevelError(
            f"{type(self).__name__} has no support function, and the duality gap cannot be computed without it. "
            "Stop by Until(…, tol=…), or give the constraint a method support(direction)."
        )

    @classmethod
    def examples(cls) -> list[tuple[Self, Tree]]:
        """Instances for the conformance battery, each with a tree that has the structure and shapes of λ."""
        return [(cls(), torch.zeros(5, dtype=torch.float64))]


def as_like(value: Any, leaf: Tensor, name: str) -> Tensor:
    """A bound as a tensor of the leaf's dtype on its device, which broadcasts to its shape."""
    bound = torch.as_tensor(value, dtype=leaf.dtype, device=leaf.device)
    sizes = zip(bound.shape[::-1], leaf.shape[::-1], strict=False)
    if bound.ndim > leaf.ndim or any(size not in (1, wanted) for size, wanted in sizes):
        raise BilevelError(
            f"{name} of shape {list(bound.shape)} does not fit a tensor of shape {list(leaf.shape)}. Pass a number, or "
            "a tensor that broadcasts to that shape."
        )
    return bound
