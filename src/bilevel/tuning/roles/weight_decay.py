"""L2 penalties: one, one per layer, or one per weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from bilevel.trees import Tree
from bilevel.tuning.roles.base import Hyperparameter, refuse_per
from bilevel.tuning.setup import Setup, refuse_parameters
from bilevel.tuning.transforms import Transform


@dataclass(frozen=True)
class WeightDecay(Hyperparameter):
    """½ Σ c‖w‖² added to the training loss, so that its gradient is c·w as with `torch.optim.SGD(weight_decay=c)`.

    With Adam it is the penalty of `torch.optim.Adam(weight_decay=c)`, not AdamW's decay.

    Args:
        start: c before tuning; for per="layer" it may be an array.
        per: "model" tunes one c, "layer" one for each module that holds parameters, "weight" one for every number in
            the model.
        only: `only(name)` says which parameters are decayed; all by default.

    >>> from bilevel.tuning.setup import Setup
    >>> setup = Setup({"0.weight": torch.ones(2, 3), "0.bias": torch.ones(2)}, steps=1, examples=1)
    >>> decay = WeightDecay(1e-2, per="layer")
    >>> value = decay.begin(setup)
    >>> round(decay.penalty(value, setup.parameters, setup).item(), 4), decay.labels(setup)
    (0.04, ['0'])
    """

    name: str = field(default="weight_decay", kw_only=True)
    start: Any = 1e-4
    range: tuple[float | None, float | None] | None = (1e-8, 1e2)
    transform: str | Transform | None = "log"
    per: Literal["model", "layer", "weight"] = "model"
    only: Callable[[str], bool] | None = None

    def __post_init__(self) -> None:
        refuse_per(self.name, self.per, ("model", "layer", "weight"))

    def begin(self, setup: Setup) -> Tree:
        chosen = self._chosen(setup)
        if self.per == "weight":
            return {name: self.spread(self.start, tuple(setup.parameters[name].shape), setup) for name in chosen}
        return self.spread(self.start, (len(setup.layer_names(chosen)),) if self.per == "layer" else (), setup)

    def labels(self, setup: Setup) -> list[str] | None:
        return setup.layer_names(self._chosen(setup)) if self.per == "layer" else None

    def axis(self) -> str | None:
        return None if self.per == "model" else self.per

    def penalty(self, value: Tree, w: dict[str, Tensor], setup: Setup) -> Tensor:
        chosen = self._chosen(setup)
        if self.per == "weight":
            return 0.5 * torch.stack([(value[name] * w[name] ** 2).sum() for name in chosen]).sum()
        squares = torch.stack([(w[name] ** 2).sum() for name in chosen])
        if self.per == "layer":
            places = setup.layers(chosen)
            value = value[[places[name] for name in chosen]]
        return 0.5 * (value * squares).sum()

    def _chosen(self, setup: Setup) -> list[str]:
        chosen = [name for name in setup.parameters if self.only is None or self.only(name)]
        refuse_parameters("WeightDecay", chosen)
        return chosen
