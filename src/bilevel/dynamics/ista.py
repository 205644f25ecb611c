"""Proximal gradient descent (ISTA)."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import Self

from bilevel import trees
from bilevel.dynamics.base import Dynamics, Loss, Setting, at, gradient_step, largest
from bilevel.dynamics.penalties import L1, Penalty
from bilevel.trees import Tree


@dataclass(frozen=True)
class ISTA(Dynamics):
    """w_t = prox_{lr·Ω}(w_{t−1} − lr·∇L(w_{t−1})): minimises L + Ω with a non-smooth Ω.

    The problem's `inner` is the smooth part L; Ω is the dynamics' own `penalty`. To learn its strength write
    `dynamics=lambda lam: ISTA(0.1, L1(lam.exp()))`.
    """

    lr: Setting
    penalty: Penalty

    def step(self, loss: Loss, w: Tree, state: Tree, t: int) -> tuple[Tree, Tree]:
        lr = at(self.lr, t)
        return self.penalty.prox(gradient_step(loss, w, lr), lr, t), state

    def stationary_step(self, loss: Loss, w: Tree, t: int) -> Tree:
        # The fixed points do not depend on the step size, so only the penalty is differentiated.
        lr = trees.detach(at(self.lr, t))
        return self.penalty.prox(gradient_step(loss, w, lr), lr, t)

    def largest_step(self, nu: float, t: int) -> tuple[float, float]:
        return largest(at(self.lr, t)), 2 / nu

    @classmethod
    def examples(cls) -> list[Self]:
        return [cls(0.3, L1(0.05))]
