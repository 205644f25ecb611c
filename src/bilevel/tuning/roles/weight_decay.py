"""L2 penalties: one, one per layer, or one per weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from bilevel.errors import BilevelError
from bilevel.trees import Tree
from bilevel.tuning.roles.base import Hyperparameter, Range, TransformLike
from bilevel.tuning.setup import Setup


@dataclass(frozen=True)
class WeightDecay(Hyperparameter):
    """½ Σ c‖w‖² added to the training loss, so that its gradient is c·w as with `torch.optim.SGD(weight_decay=c)`.

    With Adam it is the penalty of `torch.optim.Adam(weight_decay=c)`, not AdamW's decay.

    Args:
        start: c before tuning; for per="layer" it may be an array.
        per: "model" tunes one c, "layer" one for each module that holds parameters, "weight" one for every entry of a
            parameter.
        only: a function `only(name)` that is true for the parameters to be penalised. The default is all.

    >>> from bilevel.tuning.setup import Setup
    >>> setup = Setup({"0.weight": torch.ones(2, 3), "0.bias": torch.ones(2)}, steps=1, examples=1)
    >>> decay = WeightDecay(1e-2, per="layer")
    >>> value = decay.begin(setup)
    >>> round(decay.penalty(value, setup.parameters, setup).item(), 4), decay.labels(setup)
    (0.04, ['0'])
    """

    name: str = field(default="weight_decay", kw_only=True)
    start: Any = 1e-4
    range: Range = (1e-8, 1e2)
    transform: TransformLike = "log"
    per: Literal["model", "layer", "weight"] = "model"
    only: Callable[[str], bool] | None = None

    choices: ClassVar[tuple[str, ...]] = ("model", "layer", "weight")
    single: ClassVar[bool] = True

    def penalty(self, value: Tree, w: dict[str, Tensor], setup: Setup) -> Tensor:
        layers = setup.layers(self.chosen(setup)).values()
        names = [name for layer in layers for name in layer]
        if self.per == "weight":
            return 0.5 * torch.stack([(value[name] * w[name] ** 2).sum() for name in names]).sum()
        squares = torch.stack([(w[name] ** 2).sum() for name in names])
        if self.per == "layer":
            value = value[[place for place, layer in enumerate(layers) for _ in layer]]
        return 0.5 * (value * squares).sum()

    def chosen(self, setup: Setup) -> list[str]:
        names = [name for name in setup.parameters if self.only is None or self.only(name)]
        if not names:
            raise BilevelError(
                "WeightDecay(only=…) selects none of the model's parameters. Let it return True for some."
            )
        return names
