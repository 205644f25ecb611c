"""Which penalty belongs to which feature, and what ties the penalties together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bilevel.errors import BilevelError
from bilevel.estimators.folds import Array


@dataclass(frozen=True)
class Grouping:
    """λ holds the logarithm of one penalty per group of features; `of[j]` is the group of feature j."""

    of: Array

    @property
    def count(self) -> int:
        return int(self.of.max()) + 1

    def spread(self, lam: Array) -> Array:
        """The logarithm of every feature's penalty."""
        return lam[self.of]

    def gather(self, gradient: Array) -> Array:
        """∂/∂λ from the derivatives in every feature's logarithm."""
        return np.bincount(self.of, gradient, minlength=self.count)


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


def tether(lam: Array) -> tuple[float, Array]:
    """2 Σ log cosh(λ_g − mean λ) and its gradient: how far the penalties have moved apart.

    Near zero it is the square of the distance, far away its length, so that a few penalties may go far (those of
    features that are noise) while many small moves, which chance explains, are held back.
    """
    away = lam - lam.mean()
    slope = 2 * np.tanh(away)
    return float(2 * (np.logaddexp(away, -away) - np.log(2)).sum()), slope - slope.mean()
