"""The groups of features that share a penalty, and the tether between the penalties."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bilevel.errors import BilevelError
from bilevel.estimators.folds import Array, codes
from bilevel.structures.penalties import FunctionOfLam


@dataclass(frozen=True)
class Grouping:
    """The group of every feature: `of[j]` is the group of feature j. λ holds one log penalty per group."""

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
    """The groups of the argument `penalty`: "shared", "per-feature", or an array with the group of every feature."""
    if isinstance(penalty, str):
        if is_shared(penalty):
            return Grouping(np.zeros(features, dtype=int))
        if penalty == "per-feature":
            return Grouping(np.arange(features))
        raise BilevelError(
            f"penalty={penalty!r} is not possible. Pass 'shared', 'per-feature', or an array with the group of every "
            "feature."
        )
    groups = np.asarray(penalty)
    if groups.shape != (features,):
        raise BilevelError(
            f"penalty is an array of shape {groups.shape}, but X has {features} features. Pass one group per feature."
        )
    return Grouping(codes(groups, "penalty"))


@dataclass(frozen=True)
class PartOfMixture(FunctionOfLam):
    """α ρ or α (1 − ρ) for every feature, with λ = (log α, log ρ/(1 − ρ)): a part of an elastic net's penalty.

    Args:
        features: the number of features.
        absolute: True for α ρ, the penalty of |w|; False for α (1 − ρ), the penalty of w².
    """

    features: int
    absolute: bool

    def __call__(self, lam: Tensor, *data: Any) -> Tensor:
        return self._strength(lam).expand(self.features)

    def linearised(self, lam: Tensor, *data: Any) -> tuple[Tensor, Callable[[Any], Tensor]]:
        strength, sign = self._strength(lam), 1.0 if self.absolute else -1.0
        slope = torch.stack([strength, strength * sign * torch.sigmoid(-sign * lam[1])])
        return strength.expand(self.features), lambda v: v.sum(-1, keepdim=True) * slope

    def _strength(self, lam: Tensor) -> Tensor:
        return lam[0].exp() * torch.sigmoid(lam[1] if self.absolute else -lam[1])


@dataclass(frozen=True, eq=False)
class Tether(FunctionOfLam):
    """2c Σ log cosh(λ_g − mean λ), with a weight c: the distance of the log penalties from their mean.

    It is quadratic for small distances and linear for large ones, like a Huber loss. So a few penalties can become very
    large (those of features that are noise), while many small differences, which overfitting causes, are reduced. In
    the units of a log-likelihood of n rows, c = 1/n is the prior density 1/cosh of each log penalty around the mean.

    Args:
        kinds: the kind of every penalty: 0, 1, …. Each kind has a mean of its own. None is one kind.
    """

    kinds: Array | None = None

    def __call__(self, lam: Tensor, *data: Any) -> Tensor:
        (weight,) = data
        if self.kinds is None:
            distance = lam - lam.mean()
        else:
            kinds = torch.from_numpy(self.kinds)
            sums = lam.new_zeros(int(kinds.max()) + 1).index_add(0, kinds, lam)
            distance = lam - (sums / torch.bincount(kinds))[kinds]
        return weight * 2 * (torch.logaddexp(distance, -distance) - math.log(2)).sum()

    def linearised(self, lam: Tensor, *data: Any) -> tuple[Tensor, Callable[[Any], Tensor]]:
        # With numpy, because torch takes 1.6 times as long for 40 numbers.
        distance, weight = lam.detach().numpy(), 2 * float(data[0])
        distance = distance - self._means(distance)
        slope = np.tanh(distance)
        slope = weight * (slope - self._means(slope))
        value = weight * (np.logaddexp(distance, -distance) - math.log(2)).sum()
        return torch.tensor(value, dtype=lam.dtype), lambda v: v * torch.from_numpy(slope)

    def _means(self, numbers: Array) -> Any:
        """The mean over the kind of each number."""
        if self.kinds is None:
            return numbers.mean()
        return (np.bincount(self.kinds, numbers) / np.bincount(self.kinds))[self.kinds]
