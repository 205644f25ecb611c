"""Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import Self

from bilevel.dynamics.adam import Adam
from bilevel.dynamics.base import Loss, Setting, at, update
from bilevel.trees import Tree


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam's step from (1 − lr·weight_decay)·w_{t−1}, with the moments of ∇L(w_{t−1})."""

    weight_decay: Setting = 1e-2
    leafwise: ClassVar[bool] = True

    def step(self, loss: Loss, w: Tree, state: Tree, t: int) -> tuple[Tree, Tree]:
        settings = at(self.lr, t), at(self.weight_decay, t)
        shrink = update(lambda w, lr, decay: lr * decay * w, w, settings=settings)
        moved, state = super().step(loss, w, state, t)
        return update(lambda moved, shrink: moved - shrink, moved, shrink), state

    @classmethod
    def examples(cls) -> list[Self]:
        return [cls(0.1, weight_decay=0.1)]
