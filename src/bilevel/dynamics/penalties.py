"""Non-smooth penalties Ω and their proximal maps, for `ISTA` and `FISTA`."""

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

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        # A subclass with another Ω must declare anew what is known about it.
        if "value" in vars(cls) or "prox" in vars(cls):
            for name in ("duality_gap", "dual_norm", "absolute_weights"):
                if name not in vars(cls):
                    setattr(cls, name, getattr(Penalty, name))

    @abstractmethod
    def value(self, w: Tree, t: int = 1) -> Tensor:
        """Ω(w), with the strength of step t."""

    @abstractmethod
    def prox(self, w: Tree, step: Any, t: int = 1) -> Tree:
        """prox_{step·Ω}(w), with the strength of step t."""

    def duality_gap(self, w: Tree, slope: Tree, value: Tensor, t: int = 1) -> Tensor:
        """A bound on L(w) + Ω(w) minus its minimum, from ∇L(w) and L(w), for a convex L ≥ 0.

        For a minimiser u, convexity gives L(u) ≥ L(w) + ⟨∇L, u − w⟩. For a norm Ω with dual norm ρ of ∇L, and because
        Ω(u) ≤ L(w) + Ω(w), the gap is at most Ω(w) + ⟨∇L, w⟩ + max(0, ρ − 1)·(L(w) + Ω(w)).
        """
        if not bool(value >= 0):
            raise BilevelError(
                f"The duality gap needs an inner objective L ≥ 0, but here L = {float(value):.3g}. Add a constant to "
                "it, or stop by Until(…, tol=…) instead."
            )
        own = self.value(w, t)
        excess = (self.dual_norm(slope, t) - 1).clamp_min(0)
        linear = own + trees.dot(slope, w)
        # `where` avoids 0 · ∞, which occurs if a part of w has no penalty and L + Ω is zero.
        return linear + torch.where(excess > 0, excess * (value + own), 0)

    def dual_norm(self, slope: Tree, t: int = 1) -> Tensor:
        """sup ⟨slope, u⟩ over Ω(u) ≤ 1, for a Ω that is a norm."""
        raise BilevelError(
            f"{type(self).__name__} declares no dual norm, so that its duality gap is unknown. Stop by "
            "Until(…, tol=…), or give the penalty a method dual_norm(slope, t)."
        )

    def absolute_weights(self, t: int = 1) -> Any:
        """β where Ω(w) = Σ βᵢ|wᵢ| at step t; None for every other penalty."""
        return None


@dataclass(frozen=True)
class L1(Penalty):
    """Ω(w) = Σ strengthᵢ·|wᵢ|; its prox is soft thresholding.

    `strength` is a number, a tensor that broadcasts, a tree like w, or a function of t that returns one; it may come
    from λ, for example one per feature. With `positive`, Ω is infinite where a wᵢ is negative.

    >>> L1(1.0).prox(torch.tensor([3.0, -0.5]), 2.0)
    tensor([1., 0.])
    """

    strength: Any
    positive: bool = False

    def value(self, w: Tree, t: int = 1) -> Tensor:
        terms = list(zip(trees.leaves(w), per_leaf(at(self.strength, t), w), strict=True))
        if self.positive and any(bool((x < 0).any()) for x, _ in terms):
            return terms[0][0].new_tensor(torch.inf)
        return sum((torch.sum(s * x.abs()) for x, s in terms), start=terms[0][0].new_zeros(()))

    def prox(self, w: Tree, step: Any, t: int = 1) -> Tree:
        points, spec = trees.flatten(w)
        rows = zip(points, per_leaf(at(self.strength, t), w), per_leaf(step, w), strict=True)
        if self.positive:
            return spec.unflatten(torch.relu(x - s * rate) for x, s, rate in rows)
        return spec.unflatten(_soft_threshold(x, s * rate) for x, s, rate in rows)

    def dual_norm(self, slope: Tree, t: int = 1) -> Tensor:
        rows = zip(trees.leaves(slope), per_leaf(at(self.strength, t), slope), strict=True)
        return torch.stack([_ratio(g.abs(), s).max() for g, s in rows]).max()

    def absolute_weights(self, t: int = 1) -> Any:
        return at(self.strength, t)


def _soft_threshold(x: Tensor, threshold: Any) -> Tensor:
    """sign(x)·max(|x| − threshold, 0). A threshold of zero gives the identity, at x = 0 too, and so its derivative."""
    vanishes = (x.abs() <= threshold) & (threshold != 0)
    return torch.where(vanishes, 0.0, x - threshold * torch.sign(x))


def _ratio(numerator: Tensor, strength: Any) -> Tensor:
    """numerator/strength, with 0/0 = 0."""
    return torch.where(numerator == 0, 0, numerator / torch.as_tensor(strength, device=numerator.device).to(numerator))


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

    def dual_norm(self, slope: Tree, t: int = 1) -> Tensor:
        norms, strength, _ = self._norms(slope, t)
        return _ratio(norms, strength).max()

    def prox(self, w: Tree, step: Any, t: int = 1) -> Tree:
        norms, strength, index = self._norms(w, t)
        threshold = step * strength
        # A threshold of zero gives the identity, where a group is zero too.
        alive = (norms > threshold) | (threshold == 0)
        factor = torch.where(alive, 1 - threshold / torch.where(alive & (norms > 0), norms, 1.0), 0)
        return w * factor[index].reshape(-1, *[1] * (w.ndim - 1))


@dataclass(frozen=True)
class Indicator(Penalty):
    """Ω(w) = 0 in a closed convex set and infinite outside: a constraint on w. Its prox is the projection.

    Args:
        constraint: an object with `project(w)`, such as `bilevel.Box(0, 1)`. Its settings may come from λ:
            `dynamics=lambda lam: ISTA(0.1, Indicator(Box(0, lam)))` learns an upper bound.

    >>> from bilevel import NonNegative
    >>> Indicator(NonNegative()).prox(torch.tensor([3.0, -0.5]), 2.0)
    tensor([3., 0.])
    """

    constraint: Any

    def value(self, w: Tree, t: int = 1) -> Tensor:
        moved = trees.subtract(self.constraint.project(w), w)
        rounding = 100 * torch.finfo(trees.leaves(w)[0].dtype).eps
        outside = trees.norm(moved) > rounding * (1 + trees.norm(w))
        return torch.where(outside, torch.inf, 0.0)

    def prox(self, w: Tree, step: Any, t: int = 1) -> Tree:
        return self.constraint.project(w)

    def duality_gap(self, w: Tree, slope: Tree, value: Tensor, t: int = 1) -> Tensor:
        """The largest ⟨∇L, w − u⟩ over the set (Frank and Wolfe, 1956); it needs a w in the set, and no L ≥ 0."""
        return trees.dot(slope, w) + self.constraint.support(trees.scale(slope, -1.0))
