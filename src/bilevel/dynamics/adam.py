"""Adam (Kingma and Ba, 2015)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import Self

from bilevel.dynamics.base import Dynamics, Loss, Setting, at, gradient, root, update, zeros_like
from bilevel.trees import Tree


@dataclass(frozen=True)
class Adam(Dynamics):
    """w_t = w_{t−1} − lr·m̂_t/(√v̂_t + eps), with m and v running means of ∇L and ∇L².

    The root is differentiable at 0, so a weight that has had no gradient yet does not turn the hypergradient into NaN.
    """

    lr: Setting = 1e-3
    betas: tuple[Setting, Setting] = (0.9, 0.999)
    eps: Setting = 1e-8
    leafwise: ClassVar[bool] = True

    def init(self, w: Tree) -> Tree:
        return zeros_like(w), zeros_like(w)

    def step(self, loss: Loss, w: Tree, state: Tree, t: int) -> tuple[Tree, Tree]:
        lr, beta1, beta2, eps = (at(setting, t) for setting in (self.lr, *self.betas, self.eps))
        g = gradient(loss, w)
        first = update(lambda m, g, beta: beta * m + (1 - beta) * g, state[0], g, settings=(beta1,))
        second = update(lambda v, g, beta: beta * v + (1 - beta) * g * g, state[1], g, settings=(beta2,))

        def move(w, m, v, lr, beta1, beta2, eps):  # type: ignore[no-untyped-def]
            return w - lr * (m / (1 - beta1**t)) / (root(v / (1 - beta2**t)) + eps)

        return update(move, w, first, second, settings=(lr, beta1, beta2, eps)), (first, second)

    @classmethod
    def examples(cls) -> list[Self]:
        return [cls(0.1), cls(lambda t: 0.2 / t**0.5, betas=(0.8, 0.95))]
