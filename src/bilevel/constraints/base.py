"""What a constraint set Λ is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Self

from bilevel.trees import Tree


@dataclass(frozen=True)
class Constraint(ABC):
    """A closed convex set Λ (assumption (i) of Section 3 asks for a compact one), given by its Euclidean projection.

    `project(lam)` is the point of Λ nearest to λ, a new tree: λ itself is not changed. Points of Λ are mapped to
    themselves.
    """

    @abstractmethod
    def project(self, lam: Tree) -> Tree:
        """argmin over Λ of ‖· − λ‖."""

    @classmethod
    def examples(cls) -> list[tuple[Self, Tree]]:
        """Instances for the conformance battery, each with a tree that shows what it projects."""
        return [(cls(), torch.zeros(5, dtype=torch.float64))]


def as_like(value: float | Tensor, leaf: Tensor) -> Tensor:
    """A bound as a tensor of the leaf's kind."""
    return torch.as_tensor(value, dtype=leaf.dtype, device=leaf.device)
