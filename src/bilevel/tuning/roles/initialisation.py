"""Where training begins."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from bilevel.errors import BilevelError
from bilevel.trees import Tree
from bilevel.tuning.roles.base import Hyperparameter, refuse_per
from bilevel.tuning.setup import Setup
from bilevel.tuning.transforms import Transform


@dataclass(frozen=True)
class Initialisation(Hyperparameter):
    """The start w_0: the model's own, scaled by a factor per model or per layer, or every weight of it.

    Args:
        start: the factor before tuning, 1 by default. With per="weight" the model's parameters are the start.
        per: "model", "layer" (each module that holds parameters), or "weight", which learns w_0 itself.
        range: of the factor, (0.01, 100) by default, on a logarithmic scale; none for per="weight".

    >>> from bilevel.tuning.setup import Setup
    >>> import torch
    >>> setup = Setup({"0.weight": torch.ones(2), "1.weight": torch.ones(2)}, steps=1, examples=1)
    >>> Initialisation(per="layer").initial(torch.tensor([2.0, 3.0]), setup.parameters, setup)["1.weight"]
    tensor([3., 3.])
    """

    name: str = field(default="initialisation", kw_only=True)
    start: Any = None
    range: tuple[float | None, float | None] | None = None
    transform: str | Transform | None = None
    per: Literal["model", "layer", "weight"] = "layer"

    def __post_init__(self) -> None:
        refuse_per(self.name, self.per, ("model", "layer", "weight"))
        if self.per == "weight" and self.start is not None:
            raise BilevelError(
                f"Initialisation(start={self.start!r}, per='weight') has two starts: the model's parameters are "
                "already one. Leave start out, or load the parameters into the model."
            )
        if self.per != "weight":
            # A factor is positive and matters by its order of magnitude.
            object.__setattr__(self, "range", self.range or (1e-2, 1e2))
            object.__setattr__(self, "transform", self.transform or "log")

    def begin(self, setup: Setup) -> Tree:
        if self.per == "weight":
            return {name: value.detach().clone() for name, value in setup.parameters.items()}
        shape = (len(setup.layer_names()),) if self.per == "layer" else ()
        return self.spread(1.0 if self.start is None else self.start, shape, setup)

    def labels(self, setup: Setup) -> list[str] | None:
        return setup.layer_names() if self.per == "layer" else None

    def axis(self) -> str | None:
        return None if self.per == "model" else self.per

    def initial(self, value: Tree, w: dict[str, Tensor], setup: Setup) -> dict[str, Tensor]:
        if self.per == "weight":
            return dict(value)
        places = setup.layers()
        return {name: x * (value[places[name]] if self.per == "layer" else value) for name, x in w.items()}
