"""Gradient descent with a backtracking line search (Armijo, 1966)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from typing_extensions import Self

from bilevel import trees
from bilevel.dynamics.base import Dynamics, Loss, Setting, at, descend, gradient, per_leaf, update
from bilevel.errors import BilevelError
from bilevel.trees import Tree


@dataclass(frozen=True)
class LineSearch(Dynamics):
    """w_t = w_{t−1} − lr·shrinkᵏ·∇L, with the smallest k for which L falls by slope·lr·shrinkᵏ·‖∇L‖².

    k is an integer that depends on w and λ and is constant near almost every point, so that the step has a derivative:
    every method may be used. No step size has to be known; `Until(LineSearch(), tol)` stops at a tolerance.

    Args:
        lr: the longest step, which is tried first.
        shrink: the factor of the next trial, between 0 and 1.
        slope: the required fraction of the decrease that a linear model of L predicts.
        trials: the number of trials after which w is left unchanged, because rounding hides any decrease of L.
    """

    lr: Setting = 1.0
    shrink: float = 0.5
    slope: float = 1e-4
    trials: int = 40

    leafwise: ClassVar[bool] = True
    stops: ClassVar[bool] = True
    undifferentiated: ClassVar[tuple[str, ...]] = ("shrink", "slope")

    def __post_init__(self) -> None:
        if not (0 < self.shrink < 1 and 0 < self.slope < 1):
            raise BilevelError(
                f"LineSearch(shrink={self.shrink}, slope={self.slope}) is not possible: both must lie between 0 and 1."
            )

    def step(self, loss: Loss, w: Tree, state: Tree, t: int) -> tuple[Tree, Tree]:
        grads, lr = gradient(loss, w), at(self.lr, t)
        factor = self._factor(loss, trees.detach(w), trees.detach(grads), trees.detach(lr))
        return update(lambda x, g, rate: descend(x, g, rate * factor), w, grads, settings=(lr,)), state

    @torch.no_grad()
    def _factor(self, loss: Loss, w: Tree, grads: Tree, lr: Setting) -> float:
        """shrinkᵏ."""
        value, factor = float(loss(w)), 1.0
        pairs = zip(trees.leaves(grads), per_leaf(lr, w), strict=True)
        predicted = float(sum((g * g * rate).sum() for g, rate in pairs))
        for _ in range(self.trials):
            moved = update(lambda x, g, rate, factor=factor: x - factor * rate * g, w, grads, settings=(lr,))
            if float(loss(moved)) <= value - self.slope * factor * predicted:
                return factor
            factor *= self.shrink
        return 0.0

    @classmethod
    def examples(cls) -> list[Self]:
        return [cls(), cls(0.4, shrink=0.3)]
