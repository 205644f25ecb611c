"""Accelerated proximal gradient descent (FISTA; Beck and Teboulle, 2009)."""

from __future__ import annotations

from dataclasses import dataclass

from bilevel import trees
from bilevel.dynamics.base import Loss, at, gradient_step, update
from bilevel.dynamics.ista import ISTA
from bilevel.trees import Tree


@dataclass(frozen=True)
class FISTA(ISTA):
    """w_t = prox_{lr·Ω}(y − lr·∇L(y)),  y = w_{t−1} + (t − 1)/(t + 2)·(w_{t−1} − w_{t−2}).

    The weights (t − 1)/(t + 2) are those for which the iterates themselves, not only the values, are known to converge
    (Chambolle and Dossal, 2015, a = 3).
    """

    largest_step = ISTA.largest_step
    stationary_step = ISTA.stationary_step

    def init(self, w: Tree) -> Tree:
        return trees.map(lambda leaf: leaf.view_as(leaf), w)

    def step(self, loss: Loss, w: Tree, state: Tree, t: int) -> tuple[Tree, Tree]:
        lr, weight = at(self.lr, t), (t - 1) / (t + 2)
        ahead = update(lambda w, previous: w + weight * (w - previous), w, state)
        return self.penalty.prox(gradient_step(loss, ahead, lr), lr, t), w
