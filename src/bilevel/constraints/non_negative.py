"""λ ≥ 0."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bilevel import trees
from bilevel.constraints.base import Constraint
from bilevel.trees import Tree


@dataclass(frozen=True)
class NonNegative(Constraint):
    """Λ = {λ : λ ≥ 0}, entry by entry. It is not bounded; Theorem 3.2 asks for a bounded set such as `Box(0, high)`.

    >>> NonNegative().project(torch.tensor([-3.0, 0.5]))
    tensor([0.0000, 0.5000])
    """

    def project(self, lam: Tree) -> Tree:
        return trees.map(torch.relu, lam)
