"""What a hyperparameter is, and where one can enter the training of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bilevel.errors import BilevelError
from bilevel.trees import Tree
from bilevel.tuning.setup import Setup
from bilevel.tuning.transforms import Transform, as_transform


@dataclass(frozen=True)
class Hyperparameter:
    """A number, or an array of them, to be tuned: its name, where to begin, between which ends, on which scale.

    The outer optimiser moves a leaf, and `value = transform(leaf)` is what training sees. A plain `Hyperparameter` is
    given by name to a loss that takes three arguments, `loss(output, target, hp)` with `hp["name"]`, and to
    `tune(dynamics=lambda hp: …)`, so that anything differentiable can be tuned.

    The subclasses know their own place. One of your own overrides `inputs`, `targets`, `mix`, `weigh`, `penalty`,
    `settings` or `initial`, which are given the value in natural units, and `begin` where it has more than one.

    Args:
        name: what it is called in `hp`, in tables and in files.
        start: its value before tuning; a number or an array.
        range: `(low, high)`, either of which may be None. Values never leave it.
        transform: "log", "logit", "softplus", "simplex", None, or a `Transform`.

    >>> temperature = Hyperparameter("temperature", 1.0, range=(0.1, 10), transform="log")
    >>> temperature.kind().leaf(torch.tensor(1.0)).item()
    0.0
    """

    name: str
    start: Any
    range: tuple[float | None, float | None] | None = None
    transform: str | Transform | None = None

    # Whether it needs one loss per example, and whether it draws random numbers in a step.
    per_example: ClassVar[bool] = False
    random: ClassVar[bool] = False

    # What it is.

    def kind(self) -> Transform:
        """The transform over the range."""
        return as_transform(self.name, self.transform, self.range)

    def begin(self, setup: Setup) -> Tree:
        """The values before tuning, in natural units: a tensor, or a dict of tensors by the names of parameters."""
        return self.spread(self.start, (), setup)

    def labels(self, setup: Setup) -> list[str] | None:
        """Names of the entries, where they have any."""
        return None

    def axis(self) -> str | None:
        """What the entries are counted by, for the axis of a picture: "step" gives a line, other words bars."""
        return None

    # Where it enters: each of these returns what it was given, and a role overrides one of them.

    def inputs(self, value: Tree, inputs: Tree, noise: torch.Generator | None) -> Tree:
        """The inputs of a training batch."""
        return inputs

    def targets(self, value: Tree, targets: Tree, output: Any) -> Tree:
        """The targets of a training batch."""
        return targets

    def mix(self, value: Tree, losses: Sequence[Tensor]) -> Tensor | None:
        """One training loss from several; None where this is not the one to say."""
        return None

    def weigh(self, value: Tree, losses: Tensor, index: Tensor) -> Tensor:
        """The losses of the examples `index`."""
        return losses

    def penalty(self, value: Tree, w: dict[str, Tensor], setup: Setup) -> Tensor | None:
        """What is added to the training loss."""
        return None

    def settings(self, value: Tree, setup: Setup) -> dict[str, Any]:
        """Settings of the dynamics; each may be a function of t."""
        return {}

    def initial(self, value: Tree, w: dict[str, Tensor], setup: Setup) -> dict[str, Tensor]:
        """The start w_0."""
        return w

    # For the roles.

    def spread(self, start: Any, shape: tuple[int, ...], setup: Setup) -> Tensor:
        """`start` as a tensor of the model's kind, repeated to `shape` where it is a single number."""
        try:
            value = torch.as_tensor(start, dtype=setup.dtype, device=setup.device).detach().clone()
        except (TypeError, ValueError, RuntimeError) as error:
            raise BilevelError(
                f"Hyperparameter {self.name!r} starts at {start!r}, which is not a number or an array of them "
                f"({error})."
            ) from None
        if shape and value.shape != shape:
            if value.ndim:
                raise BilevelError(
                    f"Hyperparameter {self.name!r} starts at an array of shape {list(value.shape)}, but there are "
                    f"{list(shape)} values to tune. Pass one number for all, or an array of that shape."
                )
            value = value.expand(shape).clone()
        return value


def refuse_per(name: str, per: str, legal: tuple[str, ...]) -> None:
    """A BilevelError for a `per` that the role does not have."""
    if per not in legal:
        raise BilevelError(f"Hyperparameter {name!r} has per={per!r}; pass one of {', '.join(map(repr, legal))}.")
