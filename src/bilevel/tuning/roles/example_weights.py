"""A weight for every training example."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from bilevel.trees import Tree
from bilevel.tuning.roles.base import Hyperparameter
from bilevel.tuning.setup import Setup
from bilevel.tuning.transforms import Transform


@dataclass(frozen=True)
class ExampleWeights(Hyperparameter):
    """mean of vᵢ·ℓᵢ over the batch in place of the mean of ℓᵢ, with a weight vᵢ for each training example.

    The weights find examples that do not help on the validation set: wrong labels get small ones (data
    hyper-cleaning). The loss has to give one number per example; those of `torch.nn` are asked for it
    (`reduction="none"`).

    Args:
        start: the weights before tuning; one number, or an array with one per example, in the order of the data set.

    >>> import torch
    >>> weights = torch.tensor([0.0, 1.0, 0.5])
    >>> ExampleWeights().weigh(weights, torch.tensor([2.0, 4.0]), torch.tensor([2, 1]))
    tensor([1., 4.])
    """

    name: str = field(default="example_weights", kw_only=True)
    start: Any = 0.5
    range: tuple[float | None, float | None] | None = (0.0, 1.0)
    transform: str | Transform | None = "logit"

    per_example: ClassVar[bool] = True

    def begin(self, setup: Setup) -> Tree:
        return self.spread(self.start, (setup.examples,), setup)

    def axis(self) -> str | None:
        return "example"

    def weigh(self, value: Tree, losses: Tensor, index: Tensor) -> Tensor:
        return value[index] * losses
