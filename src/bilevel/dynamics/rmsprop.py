"""RMSProp (Tieleman and Hinton, 2012)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import Self

from bilevel.dynamics.base import Dynamics, Loss, Setting, at, gradient, root, update, zeros_like
from bilevel.trees import Tree


@dataclass(frozen=True)
class RMSProp(Dynamics):
    """w_t = w_{t−1} − lr·∇L/(√v_t + eps), with v_t = alpha·v_{t−1} + (1 − alpha)·∇L²."""

    lr: Setting = 1e-2
    alpha: Setting = 0.99
    eps: Setting = 1e-8
    leafwise: ClassVar[bool] = True

    def init(self, w: Tree) -> Tree:
        return zeros_like(w)

    def step(self, loss: Loss, w: Tree, state: Tree, t: int) -> tuple[Tree, Tree]:
        lr, alpha, eps = at(self.lr, t), at(self.alpha, t), at(self.eps, t)
        g = gradient(loss, w)
        second = update(lambda v, g, alpha: alpha * v + (1 - alpha) * g * g, state, g, settings=(alpha,))
        return update(lambda w, g, v, lr, eps: w - lr * g / (root(v) + eps), w, g, second, settings=(lr, eps)), second

    @classmethod
    def examples(cls) -> list[Self]:
        return [cls(0.05, 0.9)]
