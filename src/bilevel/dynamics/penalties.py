"""Non-smooth penalties Ω and their proximal maps, for the proximal dynamics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bilevel import trees
from bilevel.dynamics.base import at, per_leaf, root
from bilevel.errors import BilevelError
from bilevel.trees import Tree


@dataclass(frozen=True)
class Penalty(ABC):
    """A convex Ω(w) with a cheap prox_{s·Ω}(x) = argmin_u ½‖u − x‖² + s·Ω(u)."""

    @abstractmethod
    def value(self, w: Tree, t: int = 1) -> Tensor:
        """Ω(w), with the strength of step t."""

    @abstractmethod
    def prox(self, w: Tree, step: Any, t: int = 1) -> Tree:
        """prox_{step·Ω}(w), with the strength of step t."""


@dataclass(frozen=True)
class L1(Penalty):
    """Ω(w) = Σ strengthᵢ·|wᵢ|; its prox is soft thresholding.

    `strength` is a number, a tensor that broadcasts, a tree like w, or a function of t that returns one; it may come
    from λ, one per feature say.

    >>> L1(1.0).prox(torch.tensor([3.0, -0.5]), 2.0)
    tensor([1., -0.])
    """

    strength: Any

    def value(self, w: Tree, t: int = 1) -> Tensor:
        terms = zip(trees.leaves(w), per_leaf(at(self.strength, t), w), strict=True)
        return sum((torch.sum(s * x.abs()) for x, s in terms), start=torch.zeros(()))

    def prox(self, w: Tree, step: Any, t: int = 1) -> Tree:
        points, spec = trees.flatten(w)
        rows = zip(points, per_leaf(at(self.strength, t), w), per_leaf(step, w), strict=True)
        return spec.unflatten(torch.sign(x) * torch.relu(x.abs() - s * rate) for x, s, rate in rows)


@dataclass(frozen=True)
class GroupL2(Penalty):
    """Ω(w) = Σ_g strength_g·‖w_g‖₂ over disjoint groups of rows; its prox shrinks a whole group towards zero.

    Args:
        strength: one number, or a tensor with one entry per group.
        groups: a group number 0…G−1 for every index of the first axis of w, which must be a single tensor.
    """

    strength: Any
    groups: tuple[int, ...]

    def _norms(self, w: Tree, t: int) -> tuple[Tensor, Tensor, Tensor]:
        if not isinstance(w, Tensor) or w.ndim == 0 or len(w) != len(self.groups):
            raise BilevelError(
                f"GroupL2 names a group for each of {len(self.groups)} rows, but w is {trees.describe(w)}. It takes a "
                "single tensor whose first axis has one entry per group number."
            )
        index = torch.tensor(self.groups, device=w.device)
        squares = w.reshape(len(w), -1).square().sum(1)
        norms = root(squares.new_zeros(int(index.max()) + 1).index_add(0, index, squares))
        strength = torch.as_tensor(at(self.strength, t), dtype=w.dtype, device=w.device).expand(norms.shape)
        return norms, strength, index

    def value(self, w: Tree, t: int = 1) -> Tensor:
        norms, strength, _ = self._norms(w, t)
        return (norms * strength).sum()

    def prox(self, w: Tree, step: Any, t: int = 1) -> Tree:
        norms, strength, index = self._norms(w, t)
        alive = norms > step * strength
        factor = torch.where(alive, 1 - step * strength / torch.where(alive, norms, torch.ones_like(norms)), 0)
        return w * factor[index].reshape(-1, *[1] * (w.ndim - 1))
