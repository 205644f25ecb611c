"""The value-function family: differences of inner solutions with the outer objective added."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from bilevel import trees
from bilevel.dynamics import gradient
from bilevel.engine.limits import objective_at_rest, reached_at_rest, refuse_other_limits
from bilevel.engine.method import Hypergradient, Method, Part
from bilevel.engine.process import Bound, Process, State
from bilevel.errors import BilevelError, DivergenceError
from bilevel.trees import Tree

# The derivative at 0 from values at multiples of a width, times the width.
STENCILS: dict[int, dict[int, float]] = {
    1: {0: -1.0, 1: 1.0},
    2: {-1: -1 / 2, 0: 0.0, 1: 1 / 2},
    4: {-2: 1 / 12, -1: -2 / 3, 0: 0.0, 1: 2 / 3, 2: -1 / 12},
}
# A stencil of lower order on the same points. The difference of the two is the error of the lower one. Its square is of
# the order of the other's error for order 2; for order 4 it is a bound.
LOWER = {2: {0: -1.0, 1: 1.0}, 4: {-1: -1 / 2, 1: 1 / 2}}
POWER = {2: 2, 4: 1}
# The fraction of ‖w‖ by which σ moves w: large enough for solvers that stop at the square root of the precision.
SHARES = {1: 1e-4, 2: 1e-3, 4: 1e-2}
# The largest relative residual of w_σ that is accepted from a run that has stopped moving.
SOLVED = 1e-3
# The same for a run that was still moving. Above it, w has hardly responded to σ E, and differences mean nothing.
UNSOLVED = 0.9


@dataclass(frozen=True)
class F2SA(Method):
    """∇f(λ) = d/dσ ∇_λ [min_w L(w, λ) + σ E(w, λ)] at σ = 0, by differences in σ (Kwon et al., 2023).

    By the envelope theorem ∇_λ of that minimum is ∇_λ L + σ ∇_λ E at its minimiser w_σ: first derivatives are enough.
    Every w_σ takes T more steps of the dynamics from w_T, with σ E added to the inner objective.

    It approximates ∇f, the gradient of the limit, as `Implicit` does. The differences have an error of order σ^order.
    `stats.residual` is the relative residual of ∇²L dw/dσ + ∇E = 0, measured by gradients. `stats.error` estimates the
    distance to ∇f from that residual, a stencil of lower order, and the results in the middle of the runs; it is None
    for order 1. If the inner problem is strongly convex, `certify(…, method=F2SA())` bounds that distance in the
    `hypergradient_bound` of the certificate.

    Args:
        order: 1 compares w_σ with the minimiser of L, 2 compares w_σ and w_{−σ}, 4 also w_{2σ} and w_{−2σ}. This takes
            one, two or four inner runs, and one with σ = 0, after the run that gives w_T.
        weight: σ. It must be small compared with μ divided by the curvature of E, so that L − σ E has a minimiser. The
            default moves w by 1e-4, 1e-3 or 1e-2 of ‖w‖ for order 1, 2 or 4, and by more in single precision.
    """

    order: int = 2
    weight: float | None = None
    exact: ClassVar[bool] = False
    sees_dynamics: ClassVar[bool] = False
    second_derivatives: ClassVar[bool] = False
    tolerance: ClassVar[float] = 2e-3
    single_tolerance: ClassVar[float] = 1e-2

    def check(self, process: Process) -> None:
        if self.order not in STENCILS:
            raise BilevelError(f"F2SA(order={self.order!r}) is not known; pass 1, 2 or 4.")
        if self.weight is not None and not self.weight > 0:
            raise BilevelError(f"F2SA(weight={self.weight!r}) adds nothing to the inner objective; pass a number > 0.")
        if callable(process.bound.task.train):
            raise BilevelError(
                "F2SA compares minimisers of one inner objective, but task.train is a function of t. Pass "
                "Task(train=all_of_it, val=…), or use Reverse() or Truncated(k)."
            )
        if process.bound.dynamics.equations:
            raise BilevelError(
                f"F2SA adds the outer objective to the inner one, but {process.bound.dynamics} solves equations and "
                "minimises no objective. Use Implicit(), which differentiates the equations, or a dynamics that "
                "minimises half of their squared residual, such as GradientDescent(lr)."
            )
        if process.steps < 1:
            raise BilevelError("F2SA runs the dynamics with the outer objective added; pass steps ≥ 1.")

    def sees(self, process: Process) -> frozenset[Part]:
        return frozenset({"the inner objective", "the outer objective"})

    def __call__(self, process: Process) -> Hypergradient:
        state, t = process.run(), process.times[-1]
        self._refuse_other_limits(process, state[0], t)
        with torch.no_grad():
            value = process.bound.outer(state).detach()
        width = self.weight or _weight(process.bound, state[0], t, self.order)
        middle, end, runs = {}, {}, {point: _WithOuter(process, point * width) for point in STENCILS[self.order]}
        for point, run in runs.items():
            middle[point], end[point] = run.slopes(process, state)
        residual = max(run.residual(runs[0], t) for point, run in runs.items() if point)

        def combine(slopes: dict[int, list[Tensor]], stencil: dict[int, float]) -> list[Tensor]:
            columns = [[c / width * part for part in slopes[point]] for point, c in stencil.items()]
            return [sum(parts[1:], parts[0]) for parts in zip(*columns, strict=True)]

        found = combine(end, STENCILS[self.order])
        error = None
        if self.order > 1 and (size := _norm(found)) > 0:
            unfinished = _norm(trees.subtract(found, combine(middle, STENCILS[self.order])))
            lower = _norm(trees.subtract(found, combine(end, LOWER[self.order])))
            error = size * (lower / size) ** POWER[self.order] + max(unfinished, residual * size)
        return self.result(
            process,
            value,
            state,
            found,
            steps=(1 + len(end)) * process.steps,
            peak_memory=3 * trees.nbytes(state),
            residual=residual,
            error=error,
        )

    def _refuse_other_limits(self, process: Process, w: Tree, t: int) -> None:
        bound = process.bound
        with torch.no_grad():
            proximal = bound.dynamics.stationary_step(bound.loss(t), w, t) is not None
        if not proximal:
            with torch.no_grad():
                slope = trees.to_vector(trees.leaves(gradient(objective_at_rest(bound, t), w)))
            refuse_other_limits(process, w, slope, "F2SA()")
        elif reached_at_rest(bound, process.variables, w, t):
            raise BilevelError(
                "F2SA() differentiates the inner and outer objectives, but here λ also enters the penalty of the "
                'dynamics. Use Implicit(condition="fixed-point") or Reverse(), or move the penalty into L if it is '
                "smooth."
            )

    @classmethod
    def examples(cls) -> list[Self]:
        return [cls(), cls(order=1), cls(order=4)]


class _WithOuter(Bound):
    """The maps of a process with σ E added to the inner objective."""

    def __init__(self, process: Process, sigma: float) -> None:
        super().__init__(process, process.bound.lam, process.bound.task)
        self.sigma, self.last, self.still_moves = sigma, process.start, True

    def loss(self, t: int) -> Callable[[Tree], Tensor]:
        plain = super().loss(t)
        return plain if not self.sigma else lambda w: plain(w) + self.sigma * self.outer((w, ()))

    def slopes(self, process: Process, state: State) -> Iterator[list[Tensor]]:
        """∇_λ (L + σ E) in the middle and at the end of T more steps, from the state of the run to w_T."""
        times = process.times
        for part in (times[: len(times) // 2], times[len(times) // 2 :]):
            before = state[0]
            with torch.no_grad():
                for t in part:
                    state = self.step(state, t)
            if not trees.all_finite(state[0]):
                raise DivergenceError(
                    f"With {self.sigma:.3g} times the outer objective added, the inner problem diverged, although "
                    "without it did not: L − σ E has no minimiser. Pass a smaller F2SA(weight=…), or order=1."
                )
            self.last, self.still_moves = state[0], float(trees.norm(trees.subtract(state[0], before))) > 0
            with torch.enable_grad():
                value = self.loss(times[-1])(trees.detach(state[0]))
            parts = torch.autograd.grad(value, process.variables, allow_unused=True)
            yield [torch.zeros_like(x) if g is None else g for x, g in zip(process.variables, parts, strict=True)]

    def residual(self, plain: _WithOuter, t: int) -> float:
        """The residual of w_σ, minus that of the run without E, relative to the change that σ E made."""
        with torch.no_grad():
            slope, plain_slope = (run._slope_at_rest(t) for run in (self, plain))
            if slope is None or plain_slope is None:
                moved = trees.subtract(self.last, plain.last)
                rest = [
                    trees.subtract(run.dynamics.stationary_step(run.loss(t), run.last, t), run.last)
                    for run in (self, plain)
                ]
                change, scale = trees.subtract(*rest), float(trees.norm(moved))
            else:
                added = gradient(lambda w: self.sigma * self.outer((w, ())), self.last)
                change, scale = trees.subtract(slope, plain_slope), float(trees.norm(added))
        found = float(trees.norm(change)) / scale if scale > 0 else math.inf
        if not found <= (UNSOLVED if self.still_moves else SOLVED):
            raise BilevelError(
                "F2SA compares inner solutions that differ little, but a run ended, at a tolerance of its own or after "
                f"too few steps, before w had responded to the outer objective (relative residual {found:.2g}). "
                "Pass a smaller tolerance to the dynamics, a larger F2SA(weight=…), or more steps."
            )
        return found

    def _slope_at_rest(self, t: int) -> Tree | None:
        """The gradient that is zero at the minimiser; None for proximal dynamics."""
        if self.dynamics.stationary_step(self.loss(t), self.last, t) is not None:
            return None
        return gradient(objective_at_rest(self, t), self.last)


def _weight(bound: Bound, w: Tree, t: int, order: int) -> float:
    """The σ that moves w by a small fraction of ‖w‖, or of the length over which ∇E changes, computed from curvatures
    along ∇E."""
    leaves, spec = trees.flatten(trees.detach(w))

    def slope(objective: Callable[[Tree], Tensor], at: Tensor) -> Tensor:
        with torch.no_grad():
            return trees.to_vector(trees.leaves(gradient(objective, spec.unflatten(trees.from_vector(at, leaves)))))

    def outer(w: Tree) -> Tensor:
        return bound.outer((w, ()))

    point = trees.to_vector(leaves)
    steep, size, epsilon = slope(outer, point), float(point.norm()), torch.finfo(point.dtype).eps
    share, norm = max(SHARES[order], epsilon ** (1 / (order + 1))), float(steep.norm())
    if not norm > 0:
        return share
    h = epsilon ** (1 / 3) * (1 + size)
    along = h / norm * steep
    inner_curvature, outer_curvature = (
        float((slope(f, point + along) - slope(f, point - along)).norm()) / (2 * h) for f in (bound.loss(t), outer)
    )
    lengths = [x for x in (size / norm, 1 / outer_curvature if outer_curvature > 0 else math.inf) if 0 < x < math.inf]
    return share * (inner_curvature or 1.0) * min(lengths, default=1.0)


def _norm(parts: Tree) -> float:
    return float(trees.norm(parts))
