"""Values between two ends."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bilevel.tuning.transforms.base import FAR, Transform


@dataclass(frozen=True)
class Logit(Transform):
    """value = low + (high − low)/(1 + exp(−leaf)), for fractions and momenta; the range is (0, 1) unless given.

    |leaf| ≤ 10, so values stay 0.005 % of the range away from its ends.

    >>> Logit(0.0, 4.0).value(torch.zeros(2))
    tensor([2., 2.])
    """

    word: ClassVar[str | None] = "logit"

    def value(self, leaf: Tensor) -> Tensor:
        low, high = self.ends()
        return low + (high - low) * leaf.sigmoid()

    def leaf(self, value: Tensor) -> Tensor:
        low, high = self.ends()
        return torch.logit((value - low) / (high - low)).clamp(-FAR, FAR)

    def ends(self) -> tuple[float, float]:
        return (0.0 if self.low is None else self.low), (1.0 if self.high is None else self.high)

    def check(self) -> str | None:
        if not all(math.isfinite(end) for end in self.ends()):
            return "a logit needs two finite ends"
        return None

    def limits(self) -> tuple[float, float]:
        return -FAR, FAR
