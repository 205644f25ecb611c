"""Any dynamics, run until a tolerance is reached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from bilevel import trees
from bilevel.dynamics.base import Dynamics, Loss, gradient
from bilevel.dynamics.fista import FISTA
from bilevel.dynamics.heavy_ball import HeavyBall
from bilevel.dynamics.ista import ISTA
from bilevel.dynamics.penalties import L1
from bilevel.errors import BilevelError
from bilevel.trees import Tree


@dataclass(frozen=True)
class Until(Dynamics):
    """The steps of a dynamics until ‖∇L(w)‖ ≤ tol, ‖w − Φ(w)‖ ≤ tol, or F(w) − min F ≤ gap; then w no longer changes.

    T is the largest number of steps, and `stats.iterations` the number of steps taken. The steps before the stop are
    differentiated as they are, so that every method may be used; `Implicit()` warns if T steps were not enough.

    Args:
        dynamics: the dynamics that is run. If its limits are fixed points (proximal and projected dynamics, `Picard`,
            `Anderson`), ‖w − Φ(w)‖ is compared with `tol`; otherwise ‖∇L(w)‖ is.
        tol: the tolerance.
        gap: for `ISTA` and `FISTA`: stop when the duality gap, which bounds L + Ω minus its minimum for a convex L ≥ 0,
            is at most this. Pass `tol` or `gap`.
        every: the number of steps between two tests. A test costs a gradient.

    >>> import bilevel as bl
    >>> problem = bl.Problem(
    ...     lambda w, lam, _: ((w - lam) ** 2).sum(), lambda w, lam, _: w.sum(), lambda lam: torch.zeros(2)
    ... )
    >>> run = {"dynamics": bl.Until(bl.GradientDescent(0.3), tol=1e-3), "steps": 1000, "method": bl.Implicit()}
    >>> hg = bl.hypergradient(problem, torch.ones(2), bl.Task(None, None), **run)
    >>> hg.stats.iterations, [round(float(x), 3) for x in hg.inner]
    (10, [1.0, 1.0])
    """

    dynamics: Dynamics
    tol: float | None = None
    gap: float | None = None
    every: int = 10

    stops: ClassVar[bool] = True
    undifferentiated: ClassVar[tuple[str, ...]] = ("tol", "gap")

    def __post_init__(self) -> None:
        if not isinstance(self.dynamics, Dynamics) or (self.tol is None) == (self.gap is None) or self.every < 1:
            raise BilevelError(
                f"Until({self.dynamics!r}, tol={self.tol}, gap={self.gap}, every={self.every}) does not say when to "
                "stop. Pass a dynamics and either tol or gap: Until(GradientDescent(0.1), tol=1e-8)."
            )
        if self.gap is not None and not isinstance(self.dynamics, ISTA):
            raise BilevelError(
                f"{type(self.dynamics).__name__} has no duality gap: it minimises L without a penalty of its own. Pass "
                "tol=…, a norm of the gradient, or use FISTA(lr, penalty)."
            )

    @property
    def equations(self) -> bool:  # type: ignore[override] # as the dynamics that it runs
        return self.dynamics.equations

    @property
    def differentiable(self) -> bool:  # type: ignore[override] # as the dynamics that it runs
        return self.dynamics.differentiable

    def init(self, w: Tree) -> Tree:
        device = trees.leaves(w)[0].device
        zero, no = torch.zeros((), dtype=torch.long, device=device), torch.zeros((), dtype=torch.bool, device=device)
        return {"inside": self.dynamics.init(w), "steps": zero, "done": no}

    def step(self, loss: Loss, w: Tree, state: dict[str, Any], t: int) -> tuple[Tree, Tree]:
        if bool(state["done"]):
            return w, state
        steps = int(state["steps"])
        if steps and steps % self.every == 0 and self._reached(loss, trees.detach(w), t):
            return w, {**state, "done": torch.ones_like(state["done"])}
        w, inside = self.dynamics.step(loss, w, state["inside"], t)
        return w, {"inside": inside, "steps": state["steps"] + 1, "done": state["done"]}

    @torch.no_grad()
    def _reached(self, loss: Loss, w: Tree, t: int) -> bool:
        if self.gap is not None:
            assert isinstance(self.dynamics, ISTA)
            measured = self.dynamics.penalty.duality_gap(w, gradient(loss, w), loss(w), t)
            return bool(measured <= self.gap)
        assert self.tol is not None
        after = self.dynamics.stationary_step(loss, w, t)
        if after is not None:
            return bool(trees.norm(trees.subtract(after, w)) <= self.tol)
        decay = self.dynamics.slope_decay(t)
        slope = trees.map(lambda g, x: g + decay * x, gradient(loss, w), w)
        return bool(trees.norm(slope) <= self.tol)

    def slope_decay(self, t: int) -> float:
        return self.dynamics.slope_decay(t)

    def stationary_step(self, loss: Loss, w: Tree, t: int) -> Tree | None:
        return self.dynamics.stationary_step(loss, w, t)

    def largest_step(self, nu: float, t: int) -> tuple[float, float] | None:
        return self.dynamics.largest_step(nu, t)

    def iterations(self, state: dict[str, Tensor]) -> int:
        return int(state["steps"])

    def finished(self, state: dict[str, Tensor]) -> bool:
        return bool(state["done"])

    @classmethod
    def examples(cls) -> list[Self]:
        return [cls(HeavyBall(0.2, 0.5), tol=0.02, every=2), cls(FISTA(0.3, L1(0.05)), tol=0.01, every=2)]
