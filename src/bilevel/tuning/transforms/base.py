"""What a transform is: the way from the number an optimiser moves to the number a person means."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from bilevel.constraints.base import Constraint
from bilevel.constraints.box import Box

# Leaves of squashing transforms stay this close to 0: beyond it their slope is lost to rounding in float32.
FAR = 10.0


@dataclass(frozen=True)
class Transform(ABC):
    """An invertible map from λ's leaf, which the outer optimiser moves, to the value in natural units.

    Args:
        low: the smallest value; where it is not given the transform's own.
        high: the largest.

    Attributes:
        word: what it is called in `Hyperparameter(transform=…)`.
    """

    low: float | None = None
    high: float | None = None
    word: ClassVar[str | None] = None

    @abstractmethod
    def value(self, leaf: Tensor) -> Tensor:
        """The value in natural units."""

    @abstractmethod
    def leaf(self, value: Tensor) -> Tensor:
        """The inverse of `value`."""

    def check(self) -> str | None:
        """What is wrong with the range, or None."""
        return None

    def inside(self, value: Tensor) -> bool:
        """Whether every entry lies in the range, ends included."""
        low, high = self.ends()
        return bool((value >= low).all()) and bool((value <= high).all())

    def ends(self) -> tuple[float, float]:
        """The range in natural units; infinite where it is open."""
        return (
            float("-inf") if self.low is None else self.low,
            float("inf") if self.high is None else self.high,
        )

    @abstractmethod
    def limits(self) -> tuple[float, float]:
        """Between which numbers the leaf stays."""

    def constraint(self) -> Constraint | None:
        """Λ for the leaf."""
        low, high = self.limits()
        return None if (low, high) == (float("-inf"), float("inf")) else Box(low, high)

    def unit(self, value: Tensor) -> float:
        """How far a leaf moves to make a noticeable difference; steps of the outer optimiser are in this unit."""
        return 1.0
