"""Gradient descent with Polyak's momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import Self

from bilevel import trees
from bilevel.dynamics.base import Dynamics, Loss, Setting, at, descend, gradient, update, zeros_like
from bilevel.trees import Tree


@dataclass(frozen=True)
class HeavyBall(Dynamics):
    """v_t = momentum·v_{t−1} − lr·∇L(w_{t−1}),  w_t = w_{t−1} + v_t,  v_0 = 0.

    It converges on a quadratic exactly when lr < 2(1 + momentum)/ν and |momentum| < 1.
    """

    lr: Setting
    momentum: Setting = 0.9
    leafwise: ClassVar[bool] = True

    def init(self, w: Tree) -> Tree:
        return zeros_like(w)

    def step(self, loss: Loss, w: Tree, state: Tree, t: int) -> tuple[Tree, Tree]:
        settings = at(self.lr, t), at(self.momentum, t)
        velocity = update(
            lambda v, g, lr, momentum: descend(momentum * v, g, lr), state, gradient(loss, w), settings=settings
        )
        return trees.add(w, velocity), velocity

    def heavy_ball_form(self, t: int) -> tuple[Any, Any]:
        return at(self.lr, t), at(self.momentum, t)

    @classmethod
    def examples(cls) -> list[Self]:
        return [cls(0.2, 0.9), cls(0.2, 0.37), cls(lambda t: 0.3 / t, lambda t: 1 - 1 / (t + 2))]
