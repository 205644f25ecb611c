"""The weights before training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import Tensor

from bilevel import trees
from bilevel.errors import BilevelError
from bilevel.trees import Tree
from bilevel.tuning.roles.base import Hyperparameter, Range, TransformLike
from bilevel.tuning.setup import Setup


@dataclass(frozen=True)
class Initialisation(Hyperparameter):
    """The start w_0: the model's own parameters, times a factor per model or per layer, or w_0 itself.

    Args:
        start: the factor before tuning, 1 by default. With per="weight" the model's parameters are the start.
        per: "model", "layer" (each module that holds parameters), or "weight", which tunes w_0 itself.
        range: the range of the factor, (0.01, 100) by default, on a logarithmic scale. There is none for per="weight".

    >>> from bilevel.tuning.setup import Setup
    >>> import torch
    >>> setup = Setup({"0.weight": torch.ones(2), "1.weight": torch.ones(2)}, steps=1, examples=1)
    >>> Initialisation(per="layer").initial(torch.tensor([2.0, 3.0]), setup.parameters, setup)["1.weight"]
    tensor([3., 3.])
    """

    name: str = field(default="initialisation", kw_only=True)
    start: Any = None
    range: Range = None
    transform: TransformLike = None
    per: Literal["model", "layer", "weight"] = "layer"

    choices: ClassVar[tuple[str, ...]] = ("model", "layer", "weight")
    single: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per == "weight" and self.start is not None:
            raise BilevelError(
                f"Initialisation(start={self.start!r}, per='weight') has two starts: the model's parameters are "
                "already one. Leave start out, or load the parameters into the model."
            )
        if self.per != "weight":
            defaults = {"start": 1.0, "range": (1e-2, 1e2), "transform": "log"}
            for name, default in defaults.items():
                if getattr(self, name) is None:
                    object.__setattr__(self, name, default)

    def begin(self, setup: Setup) -> Tree:
        return trees.clone(setup.parameters) if self.per == "weight" else super().begin(setup)

    def initial(self, value: Tree, w: dict[str, Tensor], setup: Setup) -> dict[str, Tensor]:
        if self.per == "weight":
            return dict(value)
        factors = self.of_each_parameter(value, setup)
        return {name: x * factors[name] for name, x in w.items()}
