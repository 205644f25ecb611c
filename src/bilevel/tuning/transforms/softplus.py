"""Values above an end, on a scale that is linear when they are large."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bilevel.tuning.transforms.base import FAR, Transform


@dataclass(frozen=True)
class Softplus(Transform):
    """value = low + log(1 + exp(leaf)), for values ≥ low (0 unless given) that may come close to it.

    >>> Softplus(1.0).value(torch.zeros(1, dtype=torch.float64)).item()
    1.6931471805599454
    """

    word: ClassVar[str | None] = "softplus"

    def value(self, leaf: Tensor) -> Tensor:
        return self.ends()[0] + torch.nn.functional.softplus(leaf)

    def leaf(self, value: Tensor) -> Tensor:
        above = value - self.ends()[0]
        # log(exp(y) − 1) without the overflow of exp.
        return (above + torch.log(-torch.expm1(-above))).clamp_min(-FAR)

    def ends(self) -> tuple[float, float]:
        low, high = super().ends()
        return (0.0 if self.low is None else low), high

    def check(self) -> str | None:
        return None if math.isfinite(self.ends()[0]) else "a softplus needs a finite lower end"

    def limits(self) -> tuple[float, float]:
        _, high = self.ends()
        if math.isinf(high):
            return -FAR, float("inf")
        return -FAR, float(self.leaf(torch.tensor(high, dtype=torch.float64)))
