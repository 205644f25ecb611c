"""No transform: the leaf is the value."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from bilevel.tuning.transforms.base import Transform


@dataclass(frozen=True)
class Identity(Transform):
    """value = leaf, kept in its range by projection. It can reach the ends of the range exactly."""

    def value(self, leaf: Tensor) -> Tensor:
        return leaf

    def leaf(self, value: Tensor) -> Tensor:
        return value.clone()

    def limits(self) -> tuple[float, float]:
        return self.ends()

    def unit(self, value: Tensor) -> float:
        low, high = self.ends()
        if math.isfinite(high - low):
            return (high - low) / 10
        return max(float(value.abs().mean()), 1e-3)
