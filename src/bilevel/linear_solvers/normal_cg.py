"""Conjugate gradients on the normal equations (Hestenes and Stiefel, 1952)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bilevel.errors import BilevelError
from bilevel.linear_solvers.base import LinearSolution, LinearSolver, as_operator, first_residual, reachable, relative


@dataclass(frozen=True)
class NormalCG(LinearSolver):
    """Conjugate gradients on AᵀA x = Aᵀb, for any matrix that is not singular.

    An iteration takes a product with A and one with Aᵀ. The error falls for every A, at a rate that depends on the
    square of its condition number: the slow and safe choice where `GMRES` would keep too many vectors and `BiCGSTAB`
    breaks down.

    Args:
        tol: stop at ‖b − A x‖ ≤ tol·‖b‖.
        max_iter: the most products with A and Aᵀ together; None allows twenty times the size of x, and at least 1,000.
    """

    tol: float = 1e-10
    max_iter: int | None = None

    advice: ClassVar[str] = "Raise max_iter, or use GMRES(), which does not square the condition number."

    def solve(self, matvec: Callable[[Tensor], Tensor], b: Tensor, x0: Tensor | None = None) -> LinearSolution:
        operator = as_operator(matvec)
        limit = max(1000, 20 * b.numel()) if self.max_iter is None else self.max_iter
        transposed = operator.transposed_product("NormalCG")
        x, residual, products = first_residual(operator, b, x0)
        moved, epsilon, tol = products, torch.finfo(b.dtype).eps, reachable(self.tol, b)
        slope = direction = residual
        square, largest = residual.new_zeros(()), 0.0
        while relative(residual, b) > tol and products + 2 <= limit:
            slope = transposed(residual)
            before, square = square, slope.square().sum()
            # Where Aᵀr is zero but r is not, x is a least-squares solution and A x = b has none.
            if not float(slope.norm()) > 1e2 * epsilon * largest * float(residual.norm()):
                raise BilevelError(
                    f"NormalCG found no solution: the smallest relative residual is {relative(residual, b):.2g}, or a "
                    "product is not finite. The matrix is singular, so that the solution w is not isolated and has no "
                    "derivative. Add a penalty that makes w unique, or use Reverse()."
                )
            direction = slope if products == moved else slope + (square / before) * direction
            image = operator(direction)
            products += 2
            largest = max(largest, float(image.norm() / direction.norm()))
            length = square / image.square().sum()
            x, residual = x + length * direction, residual - length * image
        # The residual of the recurrence drifts from the true one, so the true one is measured.
        if products > moved:
            residual, products = b - operator(x), products + 1
        measured = relative(residual, b)
        return LinearSolution(x, measured, products, measured <= 10 * tol)
