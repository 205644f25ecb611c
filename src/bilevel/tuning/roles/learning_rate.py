"""Step sizes: one, one per layer, or a schedule with one per step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from bilevel.trees import Tree
from bilevel.tuning.roles.base import Hyperparameter, refuse_per
from bilevel.tuning.setup import Setup
from bilevel.tuning.transforms import Transform


@dataclass(frozen=True)
class LearningRate(Hyperparameter):
    """The `lr` of the dynamics.

    Args:
        start: before tuning; for per="step" an array of T values is a schedule to begin with.
        per: "run" tunes one for all steps, "step" one for each of the T steps, "layer" one for each module that holds
            parameters.

    >>> from bilevel.tuning.setup import Setup
    >>> import torch
    >>> setup = Setup({"weight": torch.ones(3)}, steps=4, examples=1)
    >>> rate = LearningRate(0.5, per="step")
    >>> schedule = rate.settings(rate.begin(setup), setup)["lr"]
    >>> schedule(1).item(), schedule(4).item()
    (0.5, 0.5)
    """

    name: str = field(default="lr", kw_only=True)
    start: Any = 0.1
    range: tuple[float | None, float | None] | None = (1e-5, 10.0)
    transform: str | Transform | None = "log"
    per: Literal["run", "step", "layer"] = "run"

    def __post_init__(self) -> None:
        refuse_per(self.name, self.per, ("run", "step", "layer"))

    def begin(self, setup: Setup) -> Tree:
        shapes = {"run": (), "step": (setup.steps,), "layer": (len(setup.layer_names()),)}
        return self.spread(self.start, shapes[self.per], setup)

    def labels(self, setup: Setup) -> list[str] | None:
        return setup.layer_names() if self.per == "layer" else None

    def axis(self) -> str | None:
        return None if self.per == "run" else self.per

    def settings(self, value: Tree, setup: Setup) -> dict[str, Any]:
        if self.per == "step":
            return {"lr": lambda t: value[t - 1]}
        if self.per == "layer":
            return {"lr": {name: value[place] for name, place in setup.layers().items()}}
        return {"lr": value}
