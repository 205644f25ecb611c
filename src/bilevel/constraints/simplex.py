"""Weights that add up to a given total."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Self

from bilevel import trees
from bilevel.constraints.base import Constraint
from bilevel.errors import BilevelError
from bilevel.trees import Tree


@dataclass(frozen=True)
class Simplex(Constraint):
    """Λ = {λ : λ ≥ 0, Σ λ = total} along the last axis of every leaf (Held, Wolfe and Crowder's projection).

    >>> Simplex().project(torch.tensor([0.9, 0.7, -1.0]))
    tensor([0.6000, 0.4000, 0.0000])
    """

    total: float = 1.0

    def __post_init__(self) -> None:
        if not self.total > 0:
            raise BilevelError(
                f"Simplex(total={self.total}) is an empty set, or the single point 0 if the total is 0. Pass total > 0."
            )

    def project(self, lam: Tree) -> Tree:
        return trees.map(self._project, lam)

    def _project(self, x: Tensor) -> Tensor:
        if x.ndim == 0:
            raise BilevelError(
                "Simplex needs a leaf with at least one axis, but a leaf of λ is a scalar. Pass a vector of weights."
            )
        descending = x.sort(dim=-1, descending=True).values
        excess = descending.cumsum(-1) - self.total
        rank = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype, device=x.device)
        # `active` entries stay positive. After the shift they add up to the total.
        active = (descending * rank > excess).sum(-1, keepdim=True).clamp_min(1)
        shift = excess.gather(-1, active - 1) / active
        return torch.relu(x - shift)

    def support(self, direction: Tree) -> Tensor:
        return torch.stack([self.total * d.amax(-1).sum() for d in trees.leaves(direction)]).sum()

    @classmethod
    def examples(cls) -> list[tuple[Self, Tree]]:
        return [(cls(), torch.zeros(5, dtype=torch.float64)), (cls(3.0), {"a": torch.zeros(2, 4, dtype=torch.float64)})]
