"""Generalised minimal residuals (Saad and Schultz, 1986)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

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
    reachable,
    relative,
)


@dataclass(frozen=True)
class GMRES(LinearSolver):
    """x = argmin ‖b − A x‖ over x_0 + span{r, A r, A² r, …}: for any matrix that is not singular.

    It needs neither symmetry nor a contraction, and its residual never grows. It keeps `restart` vectors; after as many
    products it restarts from its last x. The operator's `inverse` is used as a right preconditioner.

    Args:
        tol: stop at ‖b − A x‖ ≤ tol·‖b‖.
        max_iter: the most products with A; None allows ten times the size of x, and at least 1,000.
        restart: the number of vectors that are kept.
    """

    tol: float = 1e-10
    max_iter: int | None = None
    restart: int = 50

    advice: ClassVar[str] = "Raise restart or max_iter, or use Direct() if the matrix is small."

    def solve(self, matvec: Callable[[Tensor], Tensor], b: Tensor, x0: Tensor | None = None) -> LinearSolution:
        operator = as_operator(matvec)
        limit = max(1000, 10 * b.numel()) if self.max_iter is None else self.max_iter
        x, residual, products = first_residual(operator, b, x0)
        tol = reachable(self.tol, b)
        while relative(residual, b) > tol and products < limit:
            dimensions = min(self.restart, b.numel(), limit - products)
            move, spent, complete = _cycle(operator, residual, dimensions, tol * float(b.norm()))
            candidate = x + move
            after = b - operator(candidate)
            products += spent + 1
            if not bool(torch.isfinite(after).all()):
                raise BilevelError(
                    "GMRES met products with the matrix that are not finite: the map has no derivative at w_T, or "
                    f"its numbers exceed the range of {str(b.dtype)[6:]}."
                )
            stalled = not float(after.norm()) < 0.999 * float(residual.norm())
            if stalled and complete and relative(after, b) > 1e3 * tol:
                raise BilevelError(
                    f"GMRES searched the whole space that the matrix reaches from b, and a relative residual of "
                    f"{relative(after, b):.2g} is left: the matrix is singular, so that the solution w is not isolated "
                    "and has no derivative. Add a penalty that makes w unique, or use Reverse()."
                )
            if float(after.norm()) < float(residual.norm()):
                x, residual = candidate, after
            if stalled:
                break
        measured = relative(residual, b)
        return LinearSolution(x, measured, products, measured <= 10 * tol)

    @classmethod
    def examples(cls) -> list[Self]:
        return [cls(), cls(restart=5)]


def _cycle(operator: Operator, residual: Tensor, dimensions: int, target: float) -> tuple[Tensor, int, bool]:
    """The step that minimises the residual over a Krylov space of up to `dimensions` dimensions, the products
    spent, and whether the space is exhausted."""
    beta = residual.norm()
    basis, image = [residual / beta], residual.new_zeros(dimensions + 1, dimensions)
    for j in range(dimensions):
        vector = operator(basis[j] if operator.inverse is None else operator.inverse(basis[j]))
        size = vector.norm()
        # Orthogonalise twice, because one pass loses accuracy if the matrix is ill-conditioned.
        stacked = torch.stack(basis)
        for _ in range(2):
            coefficients = stacked @ vector
            image[: j + 1, j] += coefficients
            vector = vector - coefficients @ stacked
        image[j + 1, j] = vector.norm()
        complete = bool(image[j + 1, j] <= 10 * torch.finfo(vector.dtype).eps * size)
        # With few columns, solving the least-squares problem anew costs less than updating rotations.
        rows, goal = image[: j + 2, : j + 1], beta * torch.eye(j + 2, 1, dtype=vector.dtype, device=vector.device)
        coefficients = torch.linalg.lstsq(rows, goal).solution[:, 0] if not complete else _least_squares(rows, goal)
        residual_norm = float((rows @ coefficients - goal[:, 0]).norm())
        if complete or residual_norm <= target or j == dimensions - 1:
            break
        basis.append(vector / image[j + 1, j])
    move = coefficients @ torch.stack(basis)
    if operator.inverse is not None:
        move = operator.inverse(move)
    return move, j + 1, complete or j + 1 == residual.numel()


def _least_squares(rows: Tensor, goal: Tensor) -> Tensor:
    """The least-norm solution, because at a breakdown the columns may be dependent."""
    return (torch.linalg.pinv(rows) @ goal)[:, 0]
