"""Gradient descent within a set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from typing_extensions import Self

from bilevel import trees
from bilevel.dynamics.base import Dynamics, Loss, gradient_step, per_leaf
from bilevel.dynamics.gradient_descent import GradientDescent
from bilevel.dynamics.heavy_ball import HeavyBall
from bilevel.errors import BilevelError
from bilevel.trees import Tree


@dataclass(frozen=True)
class Projected(Dynamics):
    """w_t = P(Φ(w_{t−1})): a step of gradient descent or heavy ball, then the projection onto a closed convex set.

    The limits are the minimisers of L over the set, w = P(w − lr·∇L(w)), and `Implicit()` differentiates that. To learn
    the set, write `dynamics=lambda lam: Projected(GradientDescent(0.1), Box(0, lam))`.

    Args:
        dynamics: `GradientDescent(lr)` or `HeavyBall(lr, momentum)`. After a step of another kind, such as Adam's, the
            projected w would converge to points that are not minimisers, so other dynamics are refused.
        constraint: `Box`, `Simplex`, `Ball`, `NonNegative`, `Polyhedron`, or any object with `project(w)`.

    >>> import torch, bilevel as bl
    >>> problem = bl.Problem(
    ...     lambda w, lam, _: ((w - lam) ** 2).sum(), lambda w, lam, _: w[0], lambda lam: torch.ones(3) / 3
    ... )
    >>> run = {"dynamics": bl.Projected(bl.GradientDescent(0.25), bl.Simplex()), "steps": 60}
    >>> hg = bl.hypergradient(problem, torch.tensor([0.9, 0.7, -1.0]), bl.Task(None, None), method=bl.Implicit(), **run)
    >>> [round(float(number), 4) for number in (*hg.inner, *hg.grad)]
    [0.6, 0.4, 0.0, 0.5, -0.5, 0.0]
    """

    dynamics: Dynamics
    constraint: Any

    def __post_init__(self) -> None:
        if not isinstance(self.dynamics, Dynamics) or self.dynamics.heavy_ball_form(1) is None:
            raise BilevelError(
                f"Projected({self.dynamics!r}, …) is not known to converge to minimisers of L over the set. Pass "
                "GradientDescent(lr) or HeavyBall(lr, momentum); for acceleration write FISTA(lr, Indicator(set))."
            )
        if isinstance(self.constraint, type) or not callable(getattr(self.constraint, "project", None)):
            raise BilevelError(
                f"Projected(…, {self.constraint!r}) has no set: pass a constraint such as Simplex() or Box(0, 1), or "
                "an object with a method project(w)."
            )

    def init(self, w: Tree) -> Tree:
        return self.dynamics.init(w)

    def step(self, loss: Loss, w: Tree, state: Tree, t: int) -> tuple[Tree, Tree]:
        after, state = self.dynamics.step(loss, w, state, t)
        return self.constraint.project(after), state

    def stationary_step(self, loss: Loss, w: Tree, t: int) -> Tree:
        lr, momentum = self.dynamics.heavy_ball_form(t) or (1.0, 0.0)
        # The fixed points do not depend on a single step size.
        if _is_number(lr) and _is_number(momentum):
            return self.constraint.project(gradient_step(loss, w, trees.detach(lr)))
        # They depend on step sizes per weight. The velocity at rest is −lr/(1 − momentum)·∇L.
        rates = zip(per_leaf(lr, w), per_leaf(momentum, w), strict=True)
        at_rest = trees.flatten(w)[1].unflatten(rate / (1 - kept) for rate, kept in rates)
        return self.constraint.project(gradient_step(loss, w, at_rest))

    def largest_step(self, nu: float, t: int) -> tuple[float, float] | None:
        return self.dynamics.largest_step(nu, t)

    @classmethod
    def examples(cls) -> list[Self]:
        return [cls(GradientDescent(0.3), _Between(-0.4, 0.3)), cls(HeavyBall(0.2, 0.5), _Between(-0.4, 0.3))]


def _is_number(setting: Any) -> bool:
    return isinstance(setting, (int, float)) or (isinstance(setting, Tensor) and setting.numel() == 1)


@dataclass(frozen=True)
class _Between:
    """A constraint for the examples, because `dynamics` must not import `constraints`."""

    low: float
    high: float

    def project(self, w: Tree) -> Tree:
        return trees.map(lambda leaf: leaf.clamp(self.low, self.high), w)
