"""iMAML (Rajeswaran, Finn, Kakade and Levine, 2019): a proximal inner problem around λ, differentiated implicitly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from bilevel.engine.method import Method
from bilevel.learners.base import LearnerOptions
from bilevel.learners.catalogue.maml import MAML, MAMLOptions, Weights
from bilevel.learners.settings import setting
from bilevel.linear_solvers.base import LinearSolution, LinearSolver, Operator, as_operator, relative
from bilevel.methods.implicit import Implicit
from bilevel.problem import Problem


@dataclass(frozen=True)
class ConjugateSteps(LinearSolver):
    """A fixed number of conjugate gradient steps on (ρI + H) x = b, from x = b/ρ, the solution for H = 0.

    H is the Hessian of a network's loss and may have eigenvalues below −ρ. `CG` refuses such a system. This solver
    stops at the first direction of curvature ≤ 0, as truncated Newton methods do.
    """

    steps: int
    rho: float

    def solve(
        self, matvec: Operator | Callable[[Tensor], Tensor], b: Tensor, x0: Tensor | None = None
    ) -> LinearSolution:
        operator = as_operator(matvec)
        x = b / self.rho if x0 is None else x0
        residual = b - operator(x)
        direction, products = residual, 1
        while products <= self.steps and float(residual.norm()) > 1e-12 * float(b.norm()):
            image, products = operator(direction), products + 1
            curvature, before = torch.dot(direction, image), residual.square().sum()
            if not curvature > 0:
                break
            x, residual = x + before / curvature * direction, residual - before / curvature * image
            direction = residual + residual.square().sum() / before * direction
        # It counts as converged, because the number of steps defines the accuracy.
        return LinearSolution(x, relative(residual, b), products, True)


@dataclass(frozen=True, kw_only=True)
class IMAMLOptions(MAMLOptions):
    """The settings of `IMAML`.

    Args:
        rho: ρ, the weight of ‖w − λ‖²/2; larger values keep w nearer to λ and the inner problem better conditioned.
        cg_steps: conjugate gradient steps for the linear system.
    """

    steps: int = setting(16, least=1)
    rho: float = setting(2.0, above=0)
    cg_steps: int = setting(5, least=1)


class IMAML(MAML):
    """w_λ = argmin_w L(w) + ρ/2 ‖w − λ‖²,  ∇f = (I + ∇²L(w_λ)/ρ)⁻¹ ∇E(w_λ), the system solved by a few steps of CG.

    T gradient steps from λ approximate the minimiser, so the hypergradient is exact only if these steps and CG have
    converged. ρ = 2, 16 steps and 5 steps of CG are the paper's for Omniglot. With head=zero, the penalty pulls the
    last layer towards zero.
    """

    Options: ClassVar[type[LearnerOptions]] = IMAMLOptions
    stacks = False  # each episode has a linear system of its own

    @property
    def default_method(self) -> Method:  # type: ignore[override]
        # A few steps do not reach the minimiser of a network, and they end beside kinks of its ReLUs and maxima.
        return Implicit(ConjugateSteps(self.options.cg_steps, self.options.rho), check_kinks=False)

    @property
    def offsets(self) -> bool:
        # Implicit methods need no offsets, because λ enters the inner objective.
        return not (self.method or self.default_method).second_derivatives

    def problem(self, ways: int, *, training: bool = True) -> Problem:
        problem = super().problem(ways, training=training)

        def inner(w: Weights, lam: Weights, batch: tuple[Tensor, Tensor]) -> Tensor:
            centre = self.start(lam, ways)
            distance = sum((value - centre[name]).square().sum() for name, value in w.items())
            return problem.inner(w, lam, batch) + self.options.rho / 2 * distance

        return replace(problem, inner=inner)
