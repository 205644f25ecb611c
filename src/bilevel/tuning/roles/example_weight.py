"""The weight of an example, computed from the example by a network."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from bilevel.errors import BilevelError
from bilevel.modules import functional
from bilevel.trees import Tree
from bilevel.tuning.batches import Batch
from bilevel.tuning.roles.base import Hyperparameter, Range, TransformLike
from bilevel.tuning.setup import Setup
from bilevel.tuning.transforms import IdentityTransform

# What a scorer may receive.
PARTS = ("inputs", "targets", "loss")
# The nodes of the Gauss–Legendre rule that integrates a weight over the loss.
NODES = 8


@dataclass(frozen=True)
class ExampleWeight(Hyperparameter):
    """The mean of vᵢ·ℓᵢ over the batch, with vᵢ = sigmoid(scorer(example i)): the parameters of the scorer are tuned.

    `ExampleWeights` has a number for each training example. Here a network computes the weight, so that similar
    examples have similar weights, and new examples have weights too: `result.weights(inputs, targets)`. With
    `of=("inputs", "targets")` the scorer rates the example (DataRater), with `of="loss"` it turns the current loss into
    a weight (Meta-Weight-Net). With the loss, the training loss of an example is the integral of v from 0 to ℓᵢ, a
    learned robust loss. Its gradient is v(ℓᵢ)·∇ℓᵢ, as if the weight were a constant. A rule of eight nodes computes the
    integral: to rounding for smooth scorers, to about 0.1 % for ReLUs, and less accurately where v is steep.

    Args:
        scorer: a module that is called with the parts `of` a batch, and returns one number per example: the logit of
            its weight. Its own parameters are the start. It runs in eval mode. The loss is passed as a column.
        of: what the scorer is called with, in this order: some of "inputs", "targets", "loss".

    >>> scorer = nn.Linear(3, 1)
    >>> role = ExampleWeight(scorer, of="inputs")
    >>> value = dict(scorer.named_parameters())
    >>> batch = Batch(torch.zeros(4, 3), torch.zeros(4), torch.arange(4))
    >>> role.weights(value, batch, torch.ones(4)).shape
    torch.Size([4])
    """

    scorer: nn.Module
    of: str | tuple[str, ...] = ("inputs", "targets")
    name: str = field(default="example_weight", kw_only=True)
    start: Any = field(default=None, init=False, repr=False)
    range: Range = field(default=None, init=False, repr=False)
    transform: TransformLike = field(default=None, init=False, repr=False)
    per: Literal["weight"] = field(default="weight", init=False, repr=False)

    choices: ClassVar[tuple[str, ...]] = ("weight",)
    per_example: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.scorer, nn.Module) or not list(self.scorer.parameters()):
            raise BilevelError(
                f"ExampleWeight(scorer={type(self.scorer).__name__}) has no parameters to tune. Pass a torch.nn.Module "
                "that returns one number per example, or use ExampleWeights(), a number for each training example."
            )
        if not self.parts or any(part not in PARTS for part in self.parts):
            raise BilevelError(
                f"ExampleWeight(of={self.of!r}) is not known. Pass some of {', '.join(map(repr, PARTS))}. The scorer "
                "is called with them in the order given."
            )

        try:
            inspect.signature(self.scorer.forward).bind(*self.parts)
        except TypeError as error:
            raise BilevelError(
                f"ExampleWeight(of={self.of!r}) calls the scorer with {len(self.parts)} argument"
                f"{'s' * (len(self.parts) > 1)}, but {type(self.scorer).__name__}.forward does not take them: {error}. "
                'Name what it takes: of="inputs" for a scorer of the inputs alone, of="loss" for one of the loss.'
            ) from error

    @property
    def parts(self) -> tuple[str, ...]:
        """What the scorer is called with."""
        return (self.of,) if isinstance(self.of, str) else tuple(self.of)

    def scale(self) -> IdentityTransform:
        return NetworkWeights()

    def begin(self, setup: Setup) -> Tree:
        return {name: x.to(setup.like).detach().clone() for name, x in functional(self.scorer)[0].items()}

    def weights(self, value: Tree, batch: Batch, losses: Tensor) -> Tensor:
        """The weight of every example of a batch."""
        arguments = {"inputs": batch.inputs, "targets": batch.targets, "loss": losses.reshape(-1, 1)}
        scores = self._apply(losses)(value, *(arguments[part] for part in self.parts))
        if not isinstance(scores, Tensor) or scores.numel() != batch.count:
            raise BilevelError(
                f"The scorer of {self.name!r} returned {_shape(scores)} for {batch.count} examples. It must return one "
                "number per example."
            )
        return torch.sigmoid(scores.reshape(-1))

    def _apply(self, like: Tensor) -> Callable[..., Any]:
        """The scorer as a function of its parameters; a copy in eval mode, whose buffers have the model's dtype."""
        kind = like.dtype, like.device
        if kind not in self._copies:
            self._copies[kind] = functional(copy.deepcopy(self.scorer).to(like).eval())[1]
        return self._copies[kind]

    @functools.cached_property
    def _copies(self) -> dict[Any, Callable[..., Any]]:
        return {}

    def weigh_batch(self, value: Tree, losses: Tensor, batch: Batch) -> Tensor:
        if "loss" not in self.parts:
            return self.weights(value, batch, losses) * losses
        nodes, shares = np.polynomial.legendre.leggauss(NODES)
        means = [
            share / 2 * self.weights(value, batch, losses * (1 + node) / 2)
            for node, share in zip(nodes, shares, strict=True)
        ]
        return torch.stack(means).sum(0) * losses


def _shape(scores: Any) -> str:
    return f"a tensor of shape {list(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__


@dataclass(frozen=True)
class NetworkWeights(IdentityTransform):
    """The parameters of a network, without a transform. With the default outer_lr of 0.1, Adam's step size is 0.01."""

    def unit(self, value: Tensor) -> float:
        return 0.1
