"""Weights that add up to one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from bilevel.tuning.transforms.base import FAR, Transform


@dataclass(frozen=True)
class SimplexWeights(Transform):
    """value = softmax(leaf) along the last axis, for mixtures; leaves are centred, which makes it invertible.

    >>> import torch
    >>> SimplexWeights().value(torch.zeros(4))
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """

    word: ClassVar[str | None] = "simplex"

    def value(self, leaf: Tensor) -> Tensor:
        return leaf.softmax(-1)

    def leaf(self, value: Tensor) -> Tensor:
        logarithm = value.log()
        return (logarithm - logarithm.mean(-1, keepdim=True)).clamp(-FAR, FAR)

    def ends(self) -> tuple[float, float]:
        return 0.0, 1.0

    def check(self) -> str | None:
        if (self.low, self.high) not in ((None, None), (0, 1)):
            return "weights on a simplex lie in (0, 1) by themselves; leave the range out"
        return None

    def inside(self, value: Tensor) -> bool:
        total = value.sum(-1) if value.ndim else value
        return value.ndim > 0 and bool((value > 0).all()) and bool(((total - 1).abs() < 1e-5).all())

    def limits(self) -> tuple[float, float]:
        return -FAR, FAR
