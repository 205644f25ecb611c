"""Positive values that matter by their order of magnitude."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from bilevel.tuning.transforms.base import Transform


@dataclass(frozen=True)
class Log(Transform):
    """value = exp(leaf), for learning rates and penalties; the range bounds the logarithm.

    >>> import torch
    >>> Log(1e-3, 10.0).value(torch.zeros(2))
    tensor([1., 1.])
    """

    word: ClassVar[str | None] = "log"

    def value(self, leaf: Tensor) -> Tensor:
        return leaf.exp()

    def leaf(self, value: Tensor) -> Tensor:
        return value.log()

    def check(self) -> str | None:
        if self.low is not None and self.low <= 0:
            return f"the logarithm of {self.low} does not exist; let the range begin above 0, or use 'softplus'"
        return None

    def inside(self, value: Tensor) -> bool:
        return super().inside(value) and bool((value > 0).all())

    def limits(self) -> tuple[float, float]:
        low, high = self.ends()
        return (math.log(low) if low > 0 else float("-inf")), math.log(high)
