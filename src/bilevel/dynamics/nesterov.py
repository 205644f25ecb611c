"""Nesterov's accelerated gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import Self

from bilevel import trees
from bilevel.dynamics.base import Dynamics, Loss, Setting, at, descend, gradient, update, zeros_like
from bilevel.trees import Tree


@dataclass(frozen=True)
class Nesterov(Dynamics):
    """v_t = momentum·v_{t−1} − lr·∇L(w_{t−1} + momentum·v_{t−1}),  w_t = w_{t−1} + v_t,  v_0 = 0.

    The gradient is taken at the look-ahead point, and the iterate that is returned is w, not the look-ahead.
    """

    lr: Setting
    momentum: Setting = 0.9
    leafwise: ClassVar[bool] = True

    def init(self, w: Tree) -> Tree:
        return zeros_like(w)

    def step(self, loss: Loss, w: Tree, state: Tree, t: int) -> tuple[Tree, Tree]:
        lr, momentum = at(self.lr, t), at(self.momentum, t)
        carried = update(lambda v, momentum: momentum * v, state, settings=(momentum,))
        velocity = update(descend, carried, gradient(loss, trees.add(w, carried)), settings=(lr,))
        return trees.add(w, velocity), velocity

    @classmethod
    def examples(cls) -> list[Self]:
        return [cls(0.2, 0.8)]
