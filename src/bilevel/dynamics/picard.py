"""Picard's iteration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import Self

from bilevel.dynamics.base import Dynamics, Loss, Setting, at, mapped, update
from bilevel.trees import Tree


@dataclass(frozen=True)
class Picard(Dynamics):
    """w_t = w_{t−1} + mixing·(Φ(w_{t−1}, λ) − w_{t−1}), for a problem that is given by a fixed point or a root.

    It converges where the mixture contracts. For a root F the step is −mixing·F(w).

    Args:
        mixing: 1 is the map itself; smaller values damp it.

    >>> import torch, bilevel as bl
    >>> problem = bl.Problem(root=lambda w, lam, _: w**3 - lam, outer=lambda w, lam, _: w, init=torch.ones_like)
    >>> run = {"dynamics": bl.Picard(0.1), "steps": 100, "method": bl.Implicit()}
    >>> hg = bl.hypergradient(problem, torch.tensor(8.0).double(), bl.Task(None, None), **run)
    >>> round(float(hg.value), 6), round(float(hg.grad), 6)
    (2.0, 0.083333)
    """

    mixing: Setting = 1.0

    equations: ClassVar[bool] = True

    def step(self, loss: Loss, w: Tree, state: Tree, t: int) -> tuple[Tree, Tree]:
        image, mixing = mapped(loss, w, self), at(self.mixing, t)
        if isinstance(mixing, (int, float)) and mixing == 1:
            return image, state
        return update(lambda old, new, mixing: old + mixing * (new - old), w, image, settings=(mixing,)), state

    def stationary_step(self, loss: Loss, w: Tree, t: int) -> Tree:
        return mapped(loss, w, self)

    @classmethod
    def examples(cls) -> list[Self]:
        return [cls(), cls(0.7)]
