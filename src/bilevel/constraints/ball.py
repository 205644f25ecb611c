"""The Euclidean ball."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from bilevel import trees
from bilevel.constraints.base import Constraint, as_like
from bilevel.errors import BilevelError
from bilevel.trees import Tree


@dataclass(frozen=True)
class Ball(Constraint):
    """Λ = {λ : ‖λ − center‖ ≤ radius}, with the norm over all leaves together.

    >>> Ball(1.0).project(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """

    radius: float = 1.0
    center: Any = None

    def __post_init__(self) -> None:
        if not self.radius >= 0:
            raise BilevelError(
                f"Ball(radius={self.radius}) is an empty set: no point has a negative distance. Pass radius ≥ 0."
            )

    def project(self, lam: Tree) -> Tree:
        center = trees.map(torch.zeros_like, lam) if self.center is None else self.center
        if trees.flatten(center)[1] != trees.flatten(lam)[1]:
            raise BilevelError(
                f"Ball has the center {trees.describe(center)} for a λ of {trees.describe(lam)}. Pass a tree like λ."
            )
        center = _like(center, lam)
        offset = trees.subtract(lam, center)
        # A tensor, not a float, because an inner step may contain this projection and is differentiated.
        distance = trees.norm(offset)
        if bool(distance <= self.radius):
            return trees.map(torch.clone, lam)
        return trees.add(center, trees.scale(offset, self.radius / distance))

    def support(self, direction: Tree) -> Tensor:
        reach = self.radius * trees.norm(direction)
        return reach if self.center is None else reach + trees.dot(direction, _like(self.center, direction))

    @classmethod
    def examples(cls) -> list[tuple[Self, Tree]]:
        vector = torch.zeros(5, dtype=torch.float64)
        return [
            (cls(0.7), {"a": vector, "b": vector[:2]}),
            (cls(2.0, center=torch.ones(5, dtype=torch.float64)), vector),
        ]


def _like(center: Tree, lam: Tree) -> Tree:
    return trees.map(lambda point, leaf: as_like(point, leaf, "The center of Ball"), center, lam)
