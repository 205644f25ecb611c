"""Gradient descent, the paper's Eq. 10."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import Self

from bilevel.dynamics.base import Dynamics, Loss, Setting, at, gradient_step
from bilevel.trees import Tree


@dataclass(frozen=True)
class GradientDescent(Dynamics):
    """w_t = w_{t−1} − lr·∇L(w_{t−1}).

    It converges on a quadratic exactly when lr < 2/ν, with ν the largest curvature; `bilevel.certify` says what ν is.
    """

    lr: Setting
    leafwise: ClassVar[bool] = True

    def step(self, loss: Loss, w: Tree, state: Tree, t: int) -> tuple[Tree, Tree]:
        return gradient_step(loss, w, at(self.lr, t)), state

    def heavy_ball_form(self, t: int) -> tuple[Any, Any]:
        return at(self.lr, t), 0.0

    @classmethod
    def examples(cls) -> list[Self]:
        return [cls(0.3), cls(lambda t: 0.4 / (1 + 0.1 * t))]
