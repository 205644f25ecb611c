"""Which penalty belongs to which feature, and what ties the penalties together."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bilevel.errors import BilevelError
from bilevel.estimators.folds import Array
from bilevel.structures.penalties import FunctionOfLam


@dataclass(frozen=True)
class Grouping:
    """λ holds the logarithm of one penalty per group of features; `of[j]` is the group of feature j."""

    of: Array

    @property
    def count(self) -> int:
        return int(self.of.max()) + 1

    def mean(self, numbers: Array) -> Array:
        """The mean over the features of each group."""
        return np.bincount(self.of, numbers, minlength=self.count) / np.bincount(self.of, minlength=self.count)


def is_shared(penalty: Any) -> bool:
    return isinstance(penalty, str) and penalty == "shared"


def grouping(penalty: Any, features: int) -> Grouping:
    """The groups that `penalty` means: "shared", "per-feature", or an array with the group of every feature."""
    if isinstance(penalty, str):
        if is_shared(penalty):
            return Grouping(np.zeros(features, dtype=int))
        if penalty == "per-feature":
            return Grouping(np.arange(features))
        raise BilevelError(
            f"penalty={penalty!r} is not known; pass 'shared', 'per-feature', or an array with the group of every "
            "feature."
        )
    groups = np.asarray(penalty)
    if groups.shape != (features,):
        raise BilevelError(
            f"penalty is an array of shape {groups.shape}, but X has {features} features; pass the group of every one."
        )
    return Grouping(np.unique(groups, return_inverse=True)[1].reshape(-1))


@dataclass(frozen=True)
class PartOfMixture(FunctionOfLam):
    """α ρ or α (1 − ρ) for every feature, with λ = (log α, log ρ/(1 − ρ)): a part of an elastic net's penalty.

    Args:
        features: their number.
        absolute: the part of |w|, α ρ; otherwise that of the squares.
    """

    features: int
    absolute: bool

    def __call__(self, lam: Tensor, *data: Any) -> Tensor:
        return self._level(lam).expand(self.features)

    def linearised(self, lam: Tensor, *data: Any) -> tuple[Tensor, Callable[[Any], Tensor]]:
        level, sign = self._level(lam), 1.0 if self.absolute else -1.0
        slope = torch.stack([level, level * sign * torch.sigmoid(-sign * lam[1])])
        return level.expand(self.features), lambda v: v.sum(-1, keepdim=True) * slope

    def _level(self, lam: Tensor) -> Tensor:
        return lam[0].exp() * torch.sigmoid(lam[1] if self.absolute else -lam[1])


@dataclass(frozen=True)
class Tether(FunctionOfLam):
    """2c Σ log cosh(λ_g − mean λ), with c a weight: how far the penalties have moved apart.

    Near zero it is the square of the distance, far away its length, so that a few penalties may go far (those of
    features that are noise) while many small moves, which chance explains, are held back.
    """

    def __call__(self, lam: Tensor, *data: Any) -> Tensor:
        (weight,) = data
        away = lam - lam.mean()
        return weight * 2 * (torch.logaddexp(away, -away) - math.log(2)).sum()

    def linearised(self, lam: Tensor, *data: Any) -> tuple[Tensor, Callable[[Any], Tensor]]:
        # Arrays of numpy: on so few numbers, operations of torch take three times as long.
        away, weight = lam.detach().numpy(), 2 * float(data[0])
        away = away - away.mean()
        slope = np.tanh(away)
        slope = weight * (slope - slope.mean())
        value = weight * (np.logaddexp(away, -away) - math.log(2)).sum()
        return torch.tensor(value, dtype=lam.dtype), lambda v: v * torch.from_numpy(slope)
