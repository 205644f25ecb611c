"""The base class of hyperparameters, with the places where one can enter the training of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from bilevel.errors import BilevelError
from bilevel.trees import Tree
from bilevel.tuning.batches import Batch
from bilevel.tuning.setup import Setup
from bilevel.tuning.transforms import Transform, as_transform

Range: TypeAlias = tuple[float | None, float | None] | None
TransformLike: TypeAlias = str | Transform | None


@dataclass(frozen=True)
class Hyperparameter:
    """A number, or an array of numbers, to be tuned: its name, its start, its range, its scale.

    The outer optimiser updates a leaf of λ, and training uses `value = transform(leaf)`. A plain `Hyperparameter` is
    passed by name to a loss with three arguments, `loss(output, target, hp)` with `hp["name"]`, and to
    `tune(dynamics=lambda hp: …)`, so that anything differentiable can be tuned.

    Each subclass enters training at one place. A subclass of your own overrides `inputs`, `targets`, `mix`, `weigh`,
    `penalty`, `settings` or `initial`, all of which take the value in natural units, and `begin` if
    `start` and `per` do not determine the values before tuning.

    Args:
        name: the key in `hp`, in tables and in files.
        start: the value before tuning; a number or an array.
        range: `(low, high)`, either of which may be None. Values never leave it.
        transform: "log", "logit", "softplus", "simplex", None, or a `Transform`.
        per: what has a value of its own; `choices` lists what a subclass allows.

    >>> temperature = Hyperparameter("temperature", 1.0, range=(0.1, 10), transform="log")
    >>> temperature.scale().leaf(torch.tensor(1.0)).item()
    0.0
    """

    name: str
    start: Any
    range: Range = None
    transform: TransformLike = None
    per: str = field(default="run", kw_only=True)

    # The legal values of `per`; whether the value is one number unless `per` says otherwise; whether the role needs one
    # loss per example; whether it draws random numbers in a step.
    choices: ClassVar[tuple[str, ...]] = ("run",)
    single: ClassVar[bool] = False
    per_example: ClassVar[bool] = False
    random: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.per not in self.choices:
            raise BilevelError(
                f"Hyperparameter {self.name!r} has per={self.per!r}. Pass one of {', '.join(map(repr, self.choices))}."
            )

    def scale(self) -> Transform:
        """The transform over the range."""
        return as_transform(self.name, self.transform, self.range)

    def begin(self, setup: Setup) -> Tree:
        """The values before tuning, in natural units: a tensor, or a dict of tensors by the names of parameters."""
        if self.per == "weight":
            return {name: self.spread(self.start, setup.parameters[name].shape, setup) for name in self.chosen(setup)}
        counts = {"step": setup.steps, "example": setup.examples}
        labels = self.labels(setup)
        count = counts.get(self.per) if labels is None else len(labels)
        value = self.spread(self.start, () if count is None else (count,), setup)
        if self.single and count is None and value.ndim:
            others = " or ".join(repr(one) for one in self.choices if one != self.per)
            raise BilevelError(
                f"Hyperparameter {self.name!r} starts at an array of shape {list(value.shape)}, but per={self.per!r} "
                f"tunes one number. Pass a number{f', or per={others} for several' if others else ''}."
            )
        return value

    def labels(self, setup: Setup) -> list[str] | None:
        """The names of the entries; None if they have no names."""
        if self.per == "layer":
            return list(setup.layers(self.chosen(setup)))
        return list(setup.losses) if self.per == "loss" else None

    def chosen(self, setup: Setup) -> list[str]:
        """The names of the model's parameters that the role applies to."""
        return list(setup.parameters)

    # The places where a role can enter. The defaults change nothing, and a role overrides one of them.

    def inputs(self, value: Tree, inputs: Tree, noise: torch.Generator | None) -> Tree:
        """The inputs of a training batch."""
        return inputs

    def targets(self, value: Tree, targets: Tree, output: Any) -> Tree:
        """The targets of a training batch."""
        return targets

    def mix(self, value: Tree, losses: Sequence[Tensor]) -> Tensor | None:
        """One training loss from several; None if this role does not mix losses."""
        return None

    def weigh(self, value: Tree, losses: Tensor, index: Tensor) -> Tensor:
        """The weighted losses of the examples at the positions `index`."""
        return losses

    def weigh_batch(self, value: Tree, losses: Tensor, batch: Batch) -> Tensor:
        """The weighted losses of a batch, for a role that needs the examples themselves."""
        return self.weigh(value, losses, batch.index)

    def penalty(self, value: Tree, w: dict[str, Tensor], setup: Setup) -> Tensor | None:
        """A term that is added to the training loss."""
        return None

    def settings(self, value: Tree, setup: Setup) -> dict[str, Any]:
        """Settings of the dynamics. Each may be a function of t."""
        return {}

    def initial(self, value: Tree, w: dict[str, Tensor], setup: Setup) -> dict[str, Tensor]:
        """The start w_0."""
        return w

    # Helpers for the roles.

    def spread(self, start: Any, shape: tuple[int, ...], setup: Setup) -> Tensor:
        """`start` as a tensor of the model's dtype. A single number is repeated to `shape`."""
        try:
            value = torch.as_tensor(start, dtype=setup.like.dtype, device=setup.like.device).detach().clone()
        except (TypeError, ValueError, RuntimeError) as error:
            raise BilevelError(
                f"Hyperparameter {self.name!r} starts at {start!r}, which is not a number or an array of them "
                f"({error})."
            ) from None
        if shape and value.ndim and value.shape != shape:
            raise BilevelError(
                f"Hyperparameter {self.name!r} starts at an array of shape {list(value.shape)}, but there are "
                f"{list(shape)} values to tune. Pass one number for all, or an array of that shape."
            )
        return value.expand(shape).clone() if shape else value

    def of_each_parameter(self, value: Tree, setup: Setup) -> dict[str, Tensor]:
        """The value for every parameter of the model, by name: that of its layer, or one for all."""
        layers = enumerate(setup.layers().values())
        return {name: value[place] if self.per == "layer" else value for place, names in layers for name in names}

    def at_each_step(self, value: Tree) -> Any:
        """The value as a setting of the dynamics: a function of t if every step has its own."""
        return (lambda t: value[t - 1]) if self.per == "step" else value
