"""A mixture of several losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import Tensor

from bilevel.errors import BilevelError
from bilevel.trees import Tree
from bilevel.tuning.roles.base import Hyperparameter, Range, TransformLike
from bilevel.tuning.setup import Setup


@dataclass(frozen=True)
class LossWeights(Hyperparameter):
    """Σ weight·loss over several training losses, with weights that are positive and add up to 1.

    The losses are those of `tune(model, {"main": …, "auxiliary": …}, …, val_loss=…)`. `val_loss` must be passed,
    because the mixture itself becomes small if all weight is on an easy loss.

    Args:
        start: the weights before tuning; equal ones by default.

    >>> import torch
    >>> LossWeights().mix(torch.tensor([0.25, 0.75]), [torch.tensor(4.0), torch.tensor(8.0)])
    tensor(7.)
    """

    name: str = field(default="loss_weights", kw_only=True)
    start: Any = None
    range: Range = None
    transform: TransformLike = "simplex"
    per: Literal["loss"] = "loss"

    choices: ClassVar[tuple[str, ...]] = ("loss",)

    def begin(self, setup: Setup) -> Tree:
        count = len(setup.losses)
        if count < 2:
            raise BilevelError(
                f"{type(self).__name__} mixes several losses, but there is one, whose weight is always 1. Pass a "
                f"dict of losses to tune, or remove {self.name!r}."
            )
        return self.spread(1 / count if self.start is None else self.start, (count,), setup)

    def mix(self, value: Tree, losses: Sequence[Tensor]) -> Tensor:
        return sum((weight * loss for weight, loss in zip(value, losses, strict=True)), value.new_zeros(()))
