"""Transforms between a leaf of λ, which the outer optimiser updates, and the value in natural units."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bilevel.constraints.base import Constraint
from bilevel.constraints.box import Box
from bilevel.errors import BilevelError

# Leaves of logit, softplus and softmax stay within ±10. Beyond that, the slope rounds to zero in float32.
LARGEST_LEAF = 10.0


@dataclass(frozen=True)
class Transform(ABC):
    """An invertible map from the leaf to the value. Pass an instance of a subclass as `Hyperparameter(transform=…)`.

    Args:
        low: the smallest value. None means that of `default_range`.
        high: the largest value. None means that of `default_range`.
    """

    low: float | None = None
    high: float | None = None
    default_range: ClassVar[tuple[float, float]] = (-math.inf, math.inf)

    @abstractmethod
    def value(self, leaf: Tensor) -> Tensor:
        """The value in natural units."""

    @abstractmethod
    def leaf(self, value: Tensor) -> Tensor:
        """The inverse of `value`."""

    def range_error(self) -> str | None:
        """What is wrong with the range, or None."""
        return None

    def range(self) -> tuple[float, float]:
        """The smallest and the largest value; infinite if there is no bound."""
        low, high = self.default_range
        return (low if self.low is None else self.low), (high if self.high is None else self.high)

    def contains(self, value: Tensor) -> bool:
        """Whether every entry lies in the range, and so has a finite leaf."""
        low, high = self.range()
        # The value of the leaf of an end may be beyond the end by rounding error.
        slack = 64 * torch.finfo(value.dtype).eps * value.abs()
        return bool(((value + slack >= low) & (value - slack <= high) & self.leaf(value).isfinite()).all())

    def leaf_range(self) -> tuple[float, float]:
        """The smallest and the largest leaf."""
        low, high = (float(self.leaf(torch.tensor(end, dtype=torch.float64, device="cpu"))) for end in self.range())
        return low, high

    def constraint(self) -> Constraint | None:
        """Λ for the leaf; None if the leaf is not constrained."""
        low, high = self.leaf_range()
        return None if (low, high) == (-math.inf, math.inf) else Box(low, high)

    def unit(self, value: Tensor) -> float:
        """A noticeable change of the leaf. The outer step size is a multiple of it."""
        return 1.0


@dataclass(frozen=True)
class IdentityTransform(Transform):
    """value = leaf, projected onto the range. It can reach the ends of the range exactly."""

    def value(self, leaf: Tensor) -> Tensor:
        return leaf

    def leaf(self, value: Tensor) -> Tensor:
        return value.clone()

    def unit(self, value: Tensor) -> float:
        low, high = self.range()
        return (high - low) / 10 if math.isfinite(high - low) else max(float(value.abs().mean()), 1e-3)


@dataclass(frozen=True)
class LogTransform(Transform):
    """value = exp(leaf), for positive values that vary over orders of magnitude: learning rates, penalties.

    >>> LogTransform(1e-3, 10.0).value(torch.zeros(2))
    tensor([1., 1.])
    """

    default_range: ClassVar[tuple[float, float]] = (0.0, math.inf)

    def value(self, leaf: Tensor) -> Tensor:
        return leaf.exp()

    def leaf(self, value: Tensor) -> Tensor:
        return value.log()

    def range_error(self) -> str | None:
        if self.low is not None and self.low <= 0:
            return f"the logarithm of {self.low} does not exist. Let the range begin above 0, or use 'softplus'"
        return None


@dataclass(frozen=True)
class LogitTransform(Transform):
    """value = low + (high − low)/(1 + exp(−leaf)), for fractions and momenta.

    |leaf| ≤ 10, so values stay 0.005 % of the range away from its ends.

    >>> LogitTransform(0.0, 4.0).value(torch.zeros(2))
    tensor([2., 2.])
    """

    default_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def value(self, leaf: Tensor) -> Tensor:
        low, high = self.range()
        return low + (high - low) * leaf.sigmoid()

    def leaf(self, value: Tensor) -> Tensor:
        low, high = self.range()
        return torch.logit((value - low) / (high - low)).clamp(-LARGEST_LEAF, LARGEST_LEAF)

    def range_error(self) -> str | None:
        return None if all(map(math.isfinite, self.range())) else "a logit needs a range with two finite ends"


@dataclass(frozen=True)
class SoftplusTransform(Transform):
    """value = low + log(1 + exp(leaf)), for values ≥ low; nearly linear where the value is large.

    >>> round(SoftplusTransform(1.0).value(torch.zeros(1, dtype=torch.float64)).item(), 6)
    1.693147
    """

    default_range: ClassVar[tuple[float, float]] = (0.0, math.inf)

    def value(self, leaf: Tensor) -> Tensor:
        return self.range()[0] + torch.nn.functional.softplus(leaf)

    def leaf(self, value: Tensor) -> Tensor:
        above = value - self.range()[0]
        # log(exp(y) − 1) without the overflow of exp.
        return (above + torch.log(-torch.expm1(-above))).clamp_min(-LARGEST_LEAF)

    def range_error(self) -> str | None:
        return None if math.isfinite(self.range()[0]) else "a softplus needs a range with a finite lower end"


@dataclass(frozen=True)
class SimplexTransform(Transform):
    """value = softmax(leaf) along the last axis, for weights that add up to 1. The inverse is the leaf with mean 0.

    >>> SimplexTransform().value(torch.zeros(4))
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """

    default_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def value(self, leaf: Tensor) -> Tensor:
        return leaf.softmax(-1)

    def leaf(self, value: Tensor) -> Tensor:
        logarithm = value.log()
        return (logarithm - logarithm.mean(-1, keepdim=True)).clamp(-LARGEST_LEAF, LARGEST_LEAF)

    def range_error(self) -> str | None:
        free = (self.low, self.high) in ((None, None), (0, 1))
        return None if free else "weights on a simplex are always in (0, 1). Leave the range out"

    def contains(self, value: Tensor) -> bool:
        return value.ndim > 0 and bool((value > 0).all()) and bool(((value.sum(-1) - 1).abs() < 1e-5).all())

    def leaf_range(self) -> tuple[float, float]:
        return -LARGEST_LEAF, LARGEST_LEAF


TRANSFORMS: dict[str | None, type[Transform]] = {
    None: IdentityTransform,
    "log": LogTransform,
    "logit": LogitTransform,
    "simplex": SimplexTransform,
    "softplus": SoftplusTransform,
}


def as_transform(name: str, transform: Any, given_range: Any) -> Transform:
    """The transform of hyperparameter `name` over its range."""
    if isinstance(transform, Transform):
        if given_range is not None:
            raise BilevelError(
                f"Hyperparameter {name!r} has range={given_range} and transform={transform}, which has its own range. "
                "Leave range= out."
            )
        return transform
    if transform not in TRANSFORMS:
        raise BilevelError(
            f"Hyperparameter {name!r} has transform={transform!r}, which is not known. Pass one of "
            f"{', '.join(repr(known) for known in TRANSFORMS if known)}, None, or a Transform."
        )
    try:
        low, high = (None if end is None else float(end) for end in given_range or (None, None))
    except (TypeError, ValueError):
        raise BilevelError(
            f"Hyperparameter {name!r} has range={given_range!r}. Pass a pair (low, high), with None for an open end."
        ) from None
    if low is not None and high is not None and not low < high:
        raise BilevelError(f"Hyperparameter {name!r} has the empty range {given_range}. Pass low < high.")
    result = TRANSFORMS[transform](low, high)
    error = result.range_error()
    if error:
        raise BilevelError(f"Hyperparameter {name!r} has range={given_range} with transform={transform!r}: {error}.")
    return result
