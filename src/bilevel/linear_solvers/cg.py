"""Conjugate gradients (Hestenes and Stiefel, 1952)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from bilevel.errors import BilevelError
from bilevel.linear_solvers.base import (
    LinearSolution,
    LinearSolver,
    Operator,
    as_operator,
    first_residual,
    random_directions,
    reachable,
    relative,
)

if TYPE_CHECKING:
    from bilevel.linear_solvers.nystrom import Nystrom


@dataclass(frozen=True)
class CG(LinearSolver):
    """Conjugate gradients for a symmetric positive definite A.

    The preconditioner is `preconditioner` if it is given, else the operator's `inverse` if it has one. A map that is
    not symmetric is refused, and so is one with negative curvature: w_T is then not a minimiser of the inner problem,
    and the implicit gradient is not defined.

    Args:
        tol: stop at ‖b − A x‖ ≤ tol·‖b‖.
        max_iter: the most products with A; None allows twice the size of x.
        preconditioner: a `Nystrom` whose low-rank inverse is used as preconditioner.
    """

    tol: float = 1e-10
    max_iter: int | None = None
    preconditioner: Nystrom | None = None

    advice: ClassVar[str] = (
        "Raise max_iter, or precondition with CG(preconditioner=Nystrom(rank)) or Implicit(preconditioner=…)."
    )

    def solve(self, matvec: Callable[[Tensor], Tensor], b: Tensor, x0: Tensor | None = None) -> LinearSolution:
        operator = as_operator(matvec)
        products = 0
        if operator.symmetric is None:
            refuse_unless_symmetric(operator, b, "CG")
            operator = replace(operator, symmetric=True)
            products += 2
        if self.preconditioner is not None:
            operator = replace(operator, inverse=self.preconditioner.inverse(operator, b))
            products += min(self.preconditioner.rank, b.numel())
        x, residual, spent = conjugate(operator, b, x0, self.tol, self.max_iter)
        # The residual of the recurrence drifts from the true one, so the true one is measured.
        moved = spent > (x0 is not None)
        left = b - operator(x) if moved else residual
        measured = relative(left, b)
        products += spent + moved
        converged = measured <= 10 * reachable(self.tol, b)
        if not converged:
            _refuse_singular(operator, b, x, b - left)
            products += 1
        return LinearSolution(x, measured, products, converged)

    @classmethod
    def examples(cls) -> list[Self]:
        from bilevel.linear_solvers.nystrom import Nystrom

        return [cls(), cls(preconditioner=Nystrom(rank=4, damping=0.5))]


def conjugate(
    operator: Operator, b: Tensor, x0: Tensor | None, tol: float, max_iter: int | None = None
) -> tuple[Tensor, Tensor, int]:
    """x, the recurrence's b − A x, and the number of products; preconditioned by the operator's `inverse`.

    A poor preconditioner costs iterations, not accuracy: the residual is that of the system without it.
    """
    limit = 2 * b.numel() if max_iter is None else max_iter
    x, residual, started = first_residual(operator, b, x0)
    target = reachable(tol, b) * b.norm()
    direction, previous, iterations = torch.zeros_like(b), None, 0
    while residual.norm() > target and iterations < limit:
        preconditioned = residual if operator.inverse is None else operator.inverse(residual)
        slope = torch.dot(residual, preconditioned)
        if operator.inverse is not None and not slope > 0:
            raise BilevelError(
                f"CG's preconditioner is not positive definite: ⟨r, M r⟩ = {float(slope):.3g} at iteration "
                f"{iterations}. It must be a symmetric positive definite map, roughly the inverse of the matrix: a "
                "Cholesky factor of part of it, penalties included, or its diagonal."
            )
        direction = preconditioned if previous is None else preconditioned + (slope / previous) * direction
        image = operator(direction)
        iterations += 1
        curvature = torch.dot(direction, image)
        if not bool(torch.isfinite(curvature)):
            raise BilevelError(
                f"CG met a curvature that is {float(curvature)} at iteration {iterations}: products with the matrix "
                f"exceed the range of {str(b.dtype)[6:]}, or the objective has no second derivative at w_T. "
                "Use float32 or float64, or scale the data."
            )
        if not curvature > 0:
            raise BilevelError(
                f"CG met the curvature {float(curvature / direction.square().sum()):.3g} ≤ 0 at iteration "
                f"{iterations}: the matrix is not positive definite, so w_T is not near a strict minimiser of the "
                "inner objective. Run more inner steps, add an L2 term to the inner objective, or use Reverse(), "
                "which needs no minimiser."
            )
        length = slope / curvature
        x, residual, previous = x + length * direction, residual - length * image, slope
    return x, residual, iterations + started


def _refuse_singular(operator: Operator, b: Tensor, x: Tensor, image: Tensor) -> None:
    """Refuse an x that the matrix maps to almost nothing: division by a rounding error made it that large."""
    shrunk, usual = image.norm() / x.norm(), operator(b).norm() / b.norm()
    if shrunk <= 100 * torch.finfo(b.dtype).eps * usual:
        raise BilevelError(
            f"CG's solution grew to {float(x.norm() / b.norm()):.2g} times the right-hand side: the matrix is "
            "singular, so that the solution w is not isolated and has no derivative. Add an L2 term to the inner "
            "objective, or use Reverse()."
        )


def refuse_unless_symmetric(operator: Operator, b: Tensor, solver: str) -> None:
    """Compare ⟨u, A v⟩ with ⟨A u, v⟩ for random u and v."""
    u, v = random_directions(2, b, seed=1)
    left, right = torch.dot(u, operator(v)), torch.dot(v, operator(u))
    tolerance = 1e3 * torch.finfo(b.dtype).eps * float(u.norm() * v.norm() + left.abs() + right.abs())
    if abs(float(left - right)) > tolerance:
        raise BilevelError(
            f"{solver} was given a map that is not symmetric: ⟨u, A v⟩ = {float(left):.6g} but ⟨A u, v⟩ = "
            f"{float(right):.6g}. Use GMRES(), BiCGSTAB(), NormalCG() or Direct(), which do not need symmetry."
        )
