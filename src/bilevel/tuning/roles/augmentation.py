"""The strength of a data augmentation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from bilevel.errors import BilevelError
from bilevel.trees import Tree
from bilevel.tuning.roles.base import Hyperparameter, Range, TransformLike


def gaussian_noise(inputs: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """inputs + strength·noise, the simplest augmentation."""
    noise = torch.randn(inputs.shape, generator=generator, dtype=inputs.dtype, device=inputs.device)
    return inputs + strength * noise


@dataclass(frozen=True)
class Augmentation(Hyperparameter):
    """The strength of a data augmentation, applied to the inputs of every training batch.

    Args:
        start: the strength before tuning; an array for a function with several.
        function: `function(inputs, strength, generator)`, differentiable in `strength`. It draws all random numbers
            from `generator`, which is seeded by the step. The default adds Gaussian noise.

    >>> generator = torch.Generator().manual_seed(0)
    >>> shift = Augmentation(0.5, function=lambda x, strength, generator: x + strength)
    >>> shift.inputs(torch.tensor(0.5), torch.zeros(2), generator)
    tensor([0.5000, 0.5000])
    """

    name: str = field(default="augmentation", kw_only=True)
    start: Any = 0.1
    range: Range = (0.0, 1.0)
    transform: TransformLike = "logit"
    function: Callable[[Any, Tensor, torch.Generator], Any] = gaussian_noise

    random: ClassVar[bool] = True

    def inputs(self, value: Tree, inputs: Tree, noise: torch.Generator | None) -> Tree:
        if not callable(self.function):
            raise BilevelError(
                f"Augmentation(function={self.function!r}) is not a function. Pass "
                "function(inputs, strength, generator)."
            )
        return self.function(inputs, value, noise or torch.Generator())
