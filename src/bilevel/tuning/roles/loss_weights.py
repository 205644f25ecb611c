"""A mixture of several losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bilevel.trees import Tree
from bilevel.tuning.roles.base import Hyperparameter
from bilevel.tuning.setup import Setup
from bilevel.tuning.transforms import Transform


@dataclass(frozen=True)
class LossWeights(Hyperparameter):
    """Σ weight·loss over several training losses, with weights that are positive and add up to 1.

    The losses are those of `tune(model, {"main": …, "auxiliary": …}, …, val_loss=…)`. What should be small in the end,
    `val_loss`, has to be said, because a mixture of losses could be lowered by preferring an easy one.

    Args:
        start: the weights before tuning; equal ones by default.

    >>> LossWeights().mix(torch.tensor([0.25, 0.75]), [torch.tensor(4.0), torch.tensor(8.0)])
    tensor(7.)
    """

    name: str = field(default="loss_weights", kw_only=True)
    start: Any = None
    range: tuple[float | None, float | None] | None = None
    transform: str | Transform | None = "simplex"

    def begin(self, setup: Setup) -> Tree:
        count = len(setup.losses)
        return self.spread(1 / count if self.start is None else self.start, (count,), setup)

    def labels(self, setup: Setup) -> list[str] | None:
        return list(setup.losses)

    def axis(self) -> str | None:
        return "loss"

    def mix(self, value: Tree, losses: Sequence[Tensor]) -> Tensor:
        return sum((weight * loss for weight, loss in zip(value, losses, strict=True)), torch.zeros(()).to(value))
