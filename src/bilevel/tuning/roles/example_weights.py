"""A weight for every training example."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import Tensor

from bilevel.trees import Tree
from bilevel.tuning.roles.base import Hyperparameter, Range, TransformLike


@dataclass(frozen=True)
class ExampleWeights(Hyperparameter):
    """The mean of vᵢ·ℓᵢ over the batch replaces the mean of ℓᵢ, with a weight vᵢ for each training example.

    Examples that do not help on the validation set, such as wrong labels, get small weights (data hyper-cleaning). The
    loss must return one number per example. Losses of `torch.nn` are called with `reduction="none"`.

    Args:
        start: the weights before tuning; one number, or an array with one per example, in the order of the data set.

    >>> import torch
    >>> weights = torch.tensor([0.0, 1.0, 0.5])
    >>> ExampleWeights().weigh(weights, torch.tensor([2.0, 4.0]), torch.tensor([2, 1]))
    tensor([1., 4.])
    """

    name: str = field(default="example_weights", kw_only=True)
    start: Any = 0.5
    range: Range = (0.0, 1.0)
    transform: TransformLike = "logit"
    per: Literal["example"] = "example"

    choices: ClassVar[tuple[str, ...]] = ("example",)
    per_example: ClassVar[bool] = True

    def weigh(self, value: Tree, losses: Tensor, index: Tensor) -> Tensor:
        return value[index] * losses
