"""Momentum: one, or a schedule with one per step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from bilevel.trees import Tree
from bilevel.tuning.roles.base import Hyperparameter, Range, TransformLike
from bilevel.tuning.setup import Setup


@dataclass(frozen=True)
class Momentum(Hyperparameter):
    """The `momentum` of the dynamics, v ← momentum·v − lr·∇L; the first beta of Adam and AdamW.

    Args:
        start: the momentum before tuning; for per="step" it may be an array of T values.
        per: "run" tunes one for all steps, "step" one for each of the T steps.

    >>> from bilevel.tuning.setup import Setup
    >>> import torch
    >>> setup = Setup({"weight": torch.ones(3)}, steps=4, examples=1)
    >>> Momentum(0.5).settings(torch.tensor(0.5), setup)
    {'momentum': tensor(0.5000)}
    """

    name: str = field(default="momentum", kw_only=True)
    start: Any = 0.9
    range: Range = (0.0, 0.999)
    transform: TransformLike = "logit"
    per: Literal["run", "step"] = "run"

    choices: ClassVar[tuple[str, ...]] = ("run", "step")
    single: ClassVar[bool] = True

    def settings(self, value: Tree, setup: Setup) -> dict[str, Any]:
        return {"momentum": self.at_each_step(value)}
