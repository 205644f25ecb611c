"""All declared hyperparameters together: λ, its values in natural units, its constraint set Λ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bilevel import trees
from bilevel.constraints.per_leaf import PerLeaf
from bilevel.errors import BilevelError
from bilevel.trees import Tree
from bilevel.tuning.roles.base import Hyperparameter
from bilevel.tuning.setup import Setup
from bilevel.tuning.transforms import SimplexTransform, Transform


@dataclass(frozen=True)
class Space:
    """λ = {name: leaf} before tuning, where a leaf is a tensor, or a dict of tensors for a value per weight."""

    declared: Sequence[Hyperparameter]
    setup: Setup
    transforms: dict[str, Transform]
    lam: dict[str, Tree]

    @classmethod
    def of(cls, declared: Sequence[Hyperparameter], setup: Setup) -> Space:
        """The space of these hyperparameters. A start outside its range is refused."""
        transforms = {one.name: one.scale() for one in declared}
        lam = {}
        for one in declared:
            begin, transform = one.begin(setup), transforms[one.name]
            for leaf in trees.leaves(begin):
                if not leaf.numel():
                    raise BilevelError(
                        f"Hyperparameter {one.name!r} has no entries, so there is nothing to tune. Pass a start with "
                        "entries."
                    )
                if not transform.contains(leaf):
                    raise BilevelError(_outside(one.name, transform, leaf))
            lam[one.name] = trees.map(transform.leaf, begin)
        return cls(declared, setup, transforms, lam)

    def values(self, lam: dict[str, Tree]) -> dict[str, Tree]:
        """The values in natural units, by name. They are differentiable functions of λ."""
        return {name: trees.map(transform.value, lam[name]) for name, transform in self.transforms.items()}

    def roles(self, lam: dict[str, Tree]) -> list[tuple[Hyperparameter, Tree]]:
        """Every hyperparameter with its value at λ."""
        values = self.values(lam)
        return [(one, values[one.name]) for one in self.declared]

    def constraint(self) -> PerLeaf:
        return PerLeaf({name: transform.constraint() for name, transform in self.transforms.items()})

    def units(self) -> list[float]:
        """A noticeable change of every leaf of λ, in the order of the leaves."""
        units = {
            name: trees.map(lambda leaf, kind=kind: kind.unit(kind.value(leaf)), self.lam[name])
            for name, kind in self.transforms.items()
        }
        return trees.leaves(units)

    def at_bounds(self, lam: dict[str, Tree]) -> dict[str, tuple[int, int]]:
        """For every hyperparameter, how many of its entries are at an end of the range, and how many there are."""
        counts = {}
        for name, transform in self.transforms.items():
            low, high = transform.leaf_range()
            leaf = trees.to_vector(trees.leaves(lam[name])).double()
            tolerance = 1e-6 * (1 + leaf.abs())
            counts[name] = int(((leaf <= low + tolerance) | (leaf >= high - tolerance)).sum()), leaf.numel()
        return counts

    def plain(self, lam: dict[str, Tree]) -> dict[str, Any]:
        """Values as floats, numpy arrays, and dicts of them by layer, by loss or by the names of parameters."""
        values: dict[str, Any] = {}
        with torch.no_grad():
            for one, value in self.roles(lam):
                labels = one.labels(self.setup)
                if labels is not None:
                    values[one.name] = {label: float(x) for label, x in zip(labels, value, strict=True)}
                else:
                    single = isinstance(value, Tensor) and value.ndim == 0
                    values[one.name] = float(value) if single else trees.map(as_array, value)
        return values


def as_array(x: Tensor) -> Any:
    """A tensor as a numpy array. bfloat16 becomes float32, because numpy has no bfloat16."""
    x = x.detach().cpu()
    return (x.float() if x.dtype == torch.bfloat16 else x).numpy()


def declared_in(hyperparameters: Any) -> list[Hyperparameter]:
    """The declarations as a list. Their names must be valid and different."""
    if isinstance(hyperparameters, Hyperparameter):
        hyperparameters = [hyperparameters]
    if not isinstance(hyperparameters, (list, tuple)) or not hyperparameters:
        raise BilevelError(
            f"hyperparameters={hyperparameters!r} declares nothing to tune. Pass one or a list of them, as in "
            "[WeightDecay(1e-4, per='layer'), LearningRate(0.1)]."
        )
    names: set[str] = set()
    for one in hyperparameters:
        if not isinstance(one, Hyperparameter):
            given = f"{one.__name__} (a class; write {one.__name__}())" if isinstance(one, type) else repr(one)
            raise BilevelError(
                f"{given} is not a hyperparameter. Pass instances of Hyperparameter or of its subclasses."
            )
        if not isinstance(one.name, str) or not one.name or one.name != one.name.strip() or "/" in one.name:
            raise BilevelError(f"{one.name!r} is not a name for a hyperparameter. Pass a word such as 'temperature'.")
        if one.name in names:
            raise BilevelError(
                f"Two hyperparameters are called {one.name!r}. Give one of them another name: "
                f"{type(one).__name__}(…, name='other')."
            )
        names.add(one.name)
    return list(hyperparameters)


def _outside(name: str, transform: Transform, start: Tensor) -> str:
    least, most = float(start.min()), float(start.max())
    at = f"{least:.6g}" if least == most else f"values from {least:.6g} to {most:.6g}"
    if isinstance(transform, SimplexTransform):
        return f"Hyperparameter {name!r} starts at {at}. Pass an array of positive numbers that add up to 1."
    low, high = transform.range()
    return (
        f"Hyperparameter {name!r} starts at {at}, outside its range ({low:.6g}, {high:.6g}). Choose a start inside it, "
        "or another range."
    )
