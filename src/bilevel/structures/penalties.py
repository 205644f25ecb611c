"""Functions of λ with hand-written derivatives, because autograd would take most of the time on small problems."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


def code_of(structure: Any, *functions: Any, **settings: Any) -> tuple[Any, ...] | None:
    """The code that a structure runs: its class, its settings, and the classes of the functions of λ that it calls.

    None if one of these is not a `FunctionOfLam`: a function that the user wrote may run other code next time. Problems
    whose structures run the same code are checked once.
    """
    if not all(isinstance(function, FunctionOfLam) for function in functions):
        return None
    return type(structure), tuple(type(function) for function in functions), tuple(settings.items())


class FunctionOfLam(ABC):
    """A differentiable function of a λ that is one tensor. Other functions work as well and cost an autograd pass."""

    @abstractmethod
    def __call__(self, lam: Tensor, *data: Any) -> Tensor:
        """The value, differentiable by autograd too."""

    @abstractmethod
    def linearised(self, lam: Tensor, *data: Any) -> tuple[Tensor, Callable[[Any], Tensor]]:
        """The value, and the function v ↦ ⟨v, ∂value/∂λ⟩, both without a graph. Called under `torch.no_grad`."""


@dataclass(frozen=True, eq=False)
class GroupPenalties(FunctionOfLam):
    """α_j = scale·exp(λ_g) for a feature j of group g. A λ with a single entry is the log penalty of all features.

    Args:
        features: the number of features.
        groups: the group of every feature; None for one penalty per feature.
        scale: a factor of all penalties.

    >>> import torch
    >>> penalties = GroupPenalties(3, torch.tensor([0, 1, 1]))
    >>> alpha, pullback = penalties.linearised(torch.zeros(2))
    >>> alpha.tolist(), pullback(torch.ones(3)).tolist()
    ([1.0, 1.0, 1.0], [1.0, 2.0])
    """

    features: int
    groups: Tensor | None = None
    scale: float = 1.0

    def __call__(self, lam: Tensor, *data: Any) -> Tensor:
        return self._spread(self._levels(lam))

    def linearised(self, lam: Tensor, *data: Any) -> tuple[Tensor, Callable[[Any], Tensor]]:
        levels = self._levels(lam)
        return self._spread(levels), lambda v: self._gathered(v, levels) * levels

    def _levels(self, lam: Tensor) -> Tensor:
        return lam.exp() if self.scale == 1 else self.scale * lam.exp()

    def _spread(self, levels: Tensor) -> Tensor:
        if levels.shape[0] == 1:
            return levels.expand(self.features)
        return levels if self.groups is None else levels[self.groups]

    def _gathered(self, v: Tensor, levels: Tensor) -> Tensor:
        """The sum of v, of shape … × features, over the features of each group."""
        if levels.shape[0] == 1:
            return v.sum(-1, keepdim=True)
        if self.groups is None:
            return v
        return v.new_zeros(*v.shape[:-1], len(levels)).index_add_(-1, self.groups, v)
