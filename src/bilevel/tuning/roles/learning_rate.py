"""Step sizes: one, one per layer, or a schedule with one per step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from bilevel.trees import Tree
from bilevel.tuning.roles.base import Hyperparameter, Range, TransformLike
from bilevel.tuning.setup import Setup


@dataclass(frozen=True)
class LearningRate(Hyperparameter):
    """The `lr` of the dynamics.

    Args:
        start: the rate before tuning; for per="step" it may be an array of T values, a schedule.
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
    range: Range = (1e-5, 10.0)
    transform: TransformLike = "log"
    per: Literal["run", "step", "layer"] = "run"

    choices: ClassVar[tuple[str, ...]] = ("run", "step", "layer")
    single: ClassVar[bool] = True

    def settings(self, value: Tree, setup: Setup) -> dict[str, Any]:
        return {"lr": self.of_each_parameter(value, setup) if self.per == "layer" else self.at_each_step(value)}
