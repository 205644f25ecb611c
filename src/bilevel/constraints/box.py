"""Upper and lower bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from bilevel import trees
from bilevel.constraints.base import Constraint, as_like
from bilevel.errors import BilevelError
from bilevel.trees import Tree

BOUND = "A bound of Box"


@dataclass(frozen=True)
class Box(Constraint):
    """Λ = {λ : low ≤ λ ≤ high}, entry by entry.

    Args:
        low: a number, a tensor that broadcasts, or a tree like λ.
        high: likewise. An infinite bound is no bound.

    >>> Box(-1, 1).project(torch.tensor([-3.0, 0.5]))
    tensor([-1.0000,  0.5000])
    """

    low: Any
    high: Any

    def __post_init__(self) -> None:
        lows, highs = trees.leaves(self.low), trees.leaves(self.high)
        kinds = int, float, Tensor, np.ndarray, np.generic
        if not (lows and highs and all(isinstance(bound, kinds) for bound in (*lows, *highs))):
            raise BilevelError(
                f"Box({self.low!r}, {self.high!r}) has bounds that are not numbers. Pass numbers, tensors or trees of "
                "them; float('inf') is no bound."
            )
        if len(lows) == 1 or len(highs) == 1 or len(lows) == len(highs):
            count = max(len(lows), len(highs))
            for low, high in zip(lows * (count // len(lows)), highs * (count // len(highs)), strict=True):
                if not bool((torch.as_tensor(low, device="cpu") <= torch.as_tensor(high, device="cpu")).all()):
                    raise BilevelError(
                        f"Box({self.low!r}, {self.high!r}) is an empty set: a lower bound lies above its upper bound "
                        "(or is NaN). Pass low ≤ high."
                    )

    def project(self, lam: Tree) -> Tree:
        if isinstance(lam, Tensor) and isinstance(self.low, (int, float)) and isinstance(self.high, (int, float)):
            return lam.clamp(self.low, self.high)
        leaves, spec = trees.flatten(lam)
        lows, highs = _bounds(self.low, lam), _bounds(self.high, lam)
        clamped = [
            leaf.clamp(as_like(a, leaf, BOUND), as_like(b, leaf, BOUND))
            for leaf, a, b in zip(leaves, lows, highs, strict=True)
        ]
        return spec.unflatten(clamped)

    def support(self, direction: Tree) -> Tensor:
        rows = zip(trees.leaves(direction), _bounds(self.low, direction), _bounds(self.high, direction), strict=True)
        parts = [
            torch.where(d == 0, 0, d * torch.where(d > 0, as_like(b, d, BOUND), as_like(a, d, BOUND))).sum()
            for d, a, b in rows
        ]
        return torch.stack(parts).sum()

    @classmethod
    def examples(cls) -> list[tuple[Self, Tree]]:
        vector = torch.zeros(5, dtype=torch.float64)
        return [(cls(-1, 2), {"a": vector, "b": vector[:2]}), (cls(torch.full((5,), -0.5), float("inf")), vector)]


def _bounds(bound: Any, lam: Tree) -> list[Any]:
    if isinstance(bound, (int, float, Tensor)):
        return [bound] * len(trees.leaves(lam))
    values, spec = trees.flatten(bound)
    if spec != trees.flatten(lam)[1]:
        raise BilevelError(
            f"Box was given bounds shaped {trees.describe(bound)} for a λ of {trees.describe(lam)}. Pass a number or a "
            "tree like λ."
        )
    return values
