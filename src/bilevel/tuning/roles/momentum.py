"""Momentum: one value, or a schedule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from bilevel.trees import Tree
from bilevel.tuning.roles.base import Hyperparameter, refuse_per
from bilevel.tuning.setup import Setup
from bilevel.tuning.transforms import Transform


@dataclass(frozen=True)
class Momentum(Hyperparameter):
    """The `momentum` of the dynamics, v ← momentum·v − lr·∇L; with Adam and its kin, their first beta.

    Args:
        start: before tuning; for per="step" it may be an array of T values.
        per: "run" tunes one for all steps, "step" one for each of the T steps.

    >>> from bilevel.tuning.setup import Setup
    >>> import torch
    >>> setup = Setup({"weight": torch.ones(3)}, steps=4, examples=1)
    >>> Momentum(0.5).settings(torch.tensor(0.5), setup)
    {'momentum': tensor(0.5000)}
    """

    name: str = field(default="momentum", kw_only=True)
    start: Any = 0.9
    range: tuple[float | None, float | None] | None = (0.0, 0.999)
    transform: str | Transform | None = "logit"
    per: Literal["run", "step"] = "run"

    def __post_init__(self) -> None:
        refuse_per(self.name, self.per, ("run", "step"))

    def begin(self, setup: Setup) -> Tree:
        return self.spread(self.start, (setup.steps,) if self.per == "step" else (), setup)

    def axis(self) -> str | None:
        return None if self.per == "run" else self.per

    def settings(self, value: Tree, setup: Setup) -> dict[str, Any]:
        return {"momentum": (lambda t: value[t - 1]) if self.per == "step" else value}
