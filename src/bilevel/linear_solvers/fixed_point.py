"""The fixed-point (Richardson) iteration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bilevel.errors import BilevelError
from bilevel.linear_solvers.base import (
    LinearSolution,
    LinearSolver,
    Operator,
    as_operator,
    largest_eigenvalue,
    reachable,
    relative,
)


@dataclass(frozen=True)
class FixedPoint(LinearSolver):
    """x ← x + ω(b − A x) until ‖b − A x‖ ≤ tol·‖b‖.

    With A = I − ∂Φᵀ and ω = 1 this runs the adjoint of the inner dynamics to its own fixed point. For a Hessian ω is
    1/ν, with ν from a power iteration, unless `step` is given. A need not be symmetric.
    """

    tol: float = 1e-10
    max_iter: int = 10_000
    step: float | None = None

    advice: ClassVar[str] = "Raise max_iter, or use CG() if the matrix is symmetric and Direct() if it is small."

    def solve(self, matvec: Callable[[Tensor], Tensor], b: Tensor, x0: Tensor | None = None) -> LinearSolution:
        operator = as_operator(matvec)
        omega, products = relaxation(operator, b, self.step)
        x = omega * b if x0 is None else x0.clone()
        target, start = reachable(self.tol, b) * b.norm(), b.norm()
        for iteration in range(self.max_iter):
            residual = b - operator(x)
            if iteration == 0 and residual.norm() > start:
                # A warm start worse than zero is dropped.
                x, residual = torch.zeros_like(b), b
            if residual.norm() <= target:
                return LinearSolution(x, relative(residual, b), products + iteration + 1, True)
            if not residual.norm() <= 1e8 * start:
                raise BilevelError(
                    f"FixedPoint diverged: after {iteration} iterations the residual is "
                    f"{float(residual.norm() / start):.3g} times ‖b‖ with step {omega:.3g}. The map does not contract "
                    "at w_T: use CG() for a Hessian, or Direct() for a small problem."
                )
            x = x + omega * residual
        residual = b - operator(x)
        return LinearSolution(x, relative(residual, b), products + self.max_iter + 1, False)


def relaxation(operator: Operator, b: Tensor, step: float | None) -> tuple[float, int]:
    """The step ω of the iteration, and the products spent on finding it."""
    if step is not None:
        return step, 0
    if operator.step is not None:
        return operator.step, 0
    products = 30
    bound = largest_eigenvalue(operator, b, products)
    # Power iteration underestimates ν: 0.9/ν stays below the limit 2/ν.
    return (0.9 / bound if bound > 0 else 1.0), products
