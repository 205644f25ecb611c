"""A point close to the inner minimiser, with a bound on its distance. Certificates are computed from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bilevel import trees
from bilevel.engine.curvature import hessian
from bilevel.engine.limits import objective_at_rest
from bilevel.engine.process import Process
from bilevel.errors import BilevelError
from bilevel.linear_solvers.base import Operator
from bilevel.linear_solvers.cg import CG, conjugate
from bilevel.linear_solvers.lanczos import lanczos
from bilevel.trees import Tree

# Newton's method ends when the distance to the minimiser is below this share of ‖w‖.
RELATIVE_DISTANCE = 1e-7


def near_minimiser(process: Process, w: Tree, t: int, mu: float, nu: float) -> NearMinimiser:
    """Continue from w, by Newton's method or by the proximal steps of the dynamics, until the distance to the minimiser
    is below 1e-7·‖w‖."""
    return _by_proximal_steps(process, w, t, mu, nu) or _by_newton(process, w, t, mu)


@dataclass(frozen=True)
class NearMinimiser:
    """A point u with ‖u − w_λ‖ ≤ radius, and the value and derivatives of E there."""

    process: Process
    u: Tree
    radius: float
    gradient_norm: float
    outer_value: float
    outer_slope: float
    outer_curvature: float

    @property
    def slack(self) -> float:
        """A bound on |E(u) − f(λ)|, including rounding."""
        return (
            self.outer_slope * self.radius
            + 0.5 * self.outer_curvature * self.radius**2
            + self._rounding(abs(self.outer_value))
        )

    def _rounding(self, size: float) -> float:
        return 16 * torch.finfo(trees.leaves(self.u)[0].dtype).eps * size

    def distance(self, w: Tree) -> float:
        return float(trees.norm(trees.subtract(w, self.u))) + self.radius + self._rounding(float(trees.norm(w)))

    def value_gap(self, w: Tree, value: float) -> float:
        return abs(value - self.outer_value) + self.slack

    def smallest_steps(self, gap: float, limit: int) -> int:
        if self.slack > gap:
            raise BilevelError(
                f"A gap of {gap:.3g} cannot be certified: the minimiser itself is known only to ±{self.slack:.3g} in "
                "f. Use float64, or a larger gap."
            )
        bound = self.process.bound
        with torch.no_grad():
            state = bound.start()
            for t in range(limit + 1):
                if self.value_gap(state[0], float(bound.outer(state))) <= gap:
                    return t
                state = bound.step(state, t + 1)
        raise BilevelError(
            f"The gap {gap:.3g} is not certified after {limit} steps. Pass a larger limit=…, or a larger step size if "
            "the certificate allows it."
        )


def _with_outer(process: Process, u: Tree, radius: float, gradient_norm: float) -> NearMinimiser:
    bound = process.bound

    def outer(w: Tree) -> Tensor:
        return bound.outer((w, ()))

    slope, operator = hessian(outer, u)
    # The curvature enters the bounds with the square of a small radius, so a rough estimate is enough.
    spectrum = lanczos(operator, slope, 5)
    curvature = max(abs(spectrum.largest), abs(spectrum.smallest))
    with torch.no_grad():
        value = float(outer(u))
    return NearMinimiser(process, u, radius, gradient_norm, value, float(slope.norm()), curvature)


@dataclass(frozen=True)
class NewtonPoint:
    """The result of Newton's method: w, ‖∇L‖ at w, and the number of products with Hessians."""

    w: Tree
    gradient_norm: float
    products: int


def newton(
    loss: Callable[[Tree], Tensor],
    w: Tree,
    tol: float,
    limit: int = 50,
    inverse: Callable[[Tensor], Tensor] | None = None,
) -> NewtonPoint:
    """Continue from w by truncated Newton steps until ‖∇L‖ ≤ tol, or until no step reduces the derivative along it.

    Each linear system is solved by CG, only as accurately as the step needs, and preconditioned by `inverse`. Its
    residual is not measured, because ∇L is computed after the step anyway.

    >>> point = newton(lambda w: (w - 1).exp() - w, torch.tensor(3.0).double(), 1e-9)
    >>> round(float(point.w), 6), point.gradient_norm <= 1e-9
    (1.0, True)
    """
    return newton_from(lambda w: hessian(loss, w), w, tol, limit, inverse)


def newton_from(
    derivatives: Callable[[Tree], tuple[Tensor, Operator]],
    w: Tree,
    tol: float,
    limit: int = 50,
    inverse: Callable[[Tensor], Tensor] | None = None,
) -> NewtonPoint:
    """`newton` for an objective that is given by ∇L and products with ∇²L at a point."""
    points, spec = trees.flatten(w)
    slope, operator = derivatives(w)
    norm, products = float(slope.norm()), 0
    for _ in range(limit):
        if not norm > tol:
            break
        accuracy = min(0.1, max(0.5 * tol / norm, 1e-12))
        move, _, spent = conjugate(replace(operator, inverse=inverse), slope, None, accuracy)
        step, products = spec.unflatten(trees.from_vector(move, points)), products + spent
        along, size = float(torch.dot(slope, move)), 1.0
        while size > 1e-4:
            there = trees.map(lambda point, part, size=size: point - size * part, w, step)
            after, beyond = derivatives(there)
            if abs(float(torch.dot(after, move))) <= 0.9 * along:
                break
            size /= 2
        else:
            break
        w, slope, operator, norm = there, after, beyond, float(after.norm())
    return NewtonPoint(w, norm, products)


def _by_newton(process: Process, w: Tree, t: int, mu: float) -> NearMinimiser:
    """Newton's method from w_T, until the minimiser is within 1e-7·‖w‖ or ∇L no longer gets smaller."""
    loss = objective_at_rest(process.bound, t)
    points, spec = trees.flatten(w)
    slope, operator = hessian(loss, w)
    first = best = float(slope.norm())
    u = w
    target = mu * RELATIVE_DISTANCE * float(trees.norm(w))
    for _ in range(5):
        if best <= target:
            break
        try:
            step = CG(tol=1e-12).solve(operator, slope).x
        except BilevelError:
            break
        candidate = trees.subtract(u, spec.unflatten(trees.from_vector(step, points)))
        slope, operator = hessian(loss, candidate)
        reached = float(slope.norm())
        if not reached < best:
            break
        u, previous, best = candidate, best, reached
        if best > 0.5 * previous or best < 1e-13 * first:
            break
    return _with_outer(process, u, best / mu, first)


def _by_proximal_steps(process: Process, w: Tree, t: int, mu: float, nu: float) -> NearMinimiser | None:
    """For proximal dynamics: repeat the plain proximal step from w_T, which contracts by q, until ‖u − Φ(u)‖/(1 − q) is
    small."""
    bound = process.bound
    if bound.dynamics.equations:
        # The map of declared equations need not be a contraction, and Newton's method on ½‖w − Φ(w)‖² needs none.
        return None
    with torch.no_grad():
        after = bound.dynamics.stationary_step(bound.loss(t), w, t)
        if after is None:
            return None
        sizes = bound.dynamics.largest_step(nu, t)
        lr = 1.0 if sizes is None else sizes[0]
        factor = max(abs(1 - lr * mu), abs(1 - lr * nu))
        if factor >= 1:
            return NearMinimiser(process, w, math.inf, math.inf, 0.0, 1.0, 1.0)
        first = move = float(trees.norm(trees.subtract(after, w)))
        u = w
        for _ in range(100_000):
            if move <= 1e-13 * max(first, float(trees.norm(u))):
                break
            u = after
            after = bound.dynamics.stationary_step(bound.loss(t), u, t)
            move = float(trees.norm(trees.subtract(after, u)))
    return _with_outer(process, u, move / (1 - factor), first / lr)
