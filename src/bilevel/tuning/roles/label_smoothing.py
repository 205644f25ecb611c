"""Label smoothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from bilevel.errors import BilevelError
from bilevel.trees import Tree
from bilevel.tuning.roles.base import Hyperparameter, Range, TransformLike


@dataclass(frozen=True)
class LabelSmoothing(Hyperparameter):
    """Class labels y become probabilities (1 − ε)·onehot(y) + ε/C in training; validation keeps the labels.

    The loss must take probabilities, as `torch.nn.functional.cross_entropy` does. The result equals torch's
    `label_smoothing=ε`, which torch cannot differentiate with respect to ε.

    >>> LabelSmoothing().targets(torch.tensor(0.2), torch.tensor([1]), torch.zeros(1, 2))
    tensor([[0.1000, 0.9000]])
    """

    name: str = field(default="label_smoothing", kw_only=True)
    start: float = 0.1
    range: Range = (0.0, 0.9)
    transform: TransformLike = "logit"

    single: ClassVar[bool] = True

    def targets(self, value: Tree, targets: Tree, output: Any) -> Tree:
        if not (isinstance(targets, Tensor) and isinstance(output, Tensor) and output.ndim == 2):
            raise BilevelError(
                f"{type(self).__name__} needs outputs of shape (examples, classes) and class labels, but the outputs "
                f"are {_shape(output)} and the targets {_shape(targets)}. Remove {self.name!r}."
            )
        classes = output.shape[1]
        if classes < 2 or (targets.is_floating_point() and targets.shape != output.shape):
            raise BilevelError(
                f"{type(self).__name__} needs one output per class, but the outputs are {_shape(output)} and the "
                f"targets {_shape(targets)}. Give the model one output per class (two for yes and no), and pass "
                "labels, or probabilities of the same shape as the outputs."
            )
        if not targets.is_floating_point():
            try:
                targets = torch.nn.functional.one_hot(targets.long(), classes).to(output)
            except RuntimeError as error:
                raise BilevelError(
                    f"{type(self).__name__} needs a class from 0 to {classes - 1} for every example ({error}). Leave "
                    "out examples with ignored labels, such as -100."
                ) from None
        return (1 - value) * targets + value / classes


def _shape(value: Any) -> str:
    return f"of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
