"""Stabilised biconjugate gradients (van der Vorst, 1992)."""

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
    first_residual,
    random_directions,
    reachable,
    relative,
)


@dataclass(frozen=True)
class BiCGSTAB(LinearSolver):
    """Two products with A per iteration and a fixed number of vectors, for matrices that are not symmetric.

    The residual may jump, and a breakdown is possible. The iteration then restarts with another shadow residual; if
    that does not help, the best x so far is returned. `GMRES` is more robust and keeps more vectors. The operator's
    `inverse` is used as a right preconditioner.

    Args:
        tol: stop at ‖b − A x‖ ≤ tol·‖b‖.
        max_iter: the most products with A; None allows twenty times the size of x, and at least 1,000.
        restarts: how often it may begin again after a breakdown.
    """

    tol: float = 1e-10
    max_iter: int | None = None
    restarts: int = 20

    advice: ClassVar[str] = "Raise max_iter, or use GMRES(), whose residual never grows."

    def solve(self, matvec: Callable[[Tensor], Tensor], b: Tensor, x0: Tensor | None = None) -> LinearSolution:
        operator = as_operator(matvec)
        limit = max(1000, 20 * b.numel()) if self.max_iter is None else self.max_iter
        x, residual, products = first_residual(operator, b, x0)
        tol, measured = reachable(self.tol, b), relative(residual, b)
        for attempt in range(1 + self.restarts):
            if measured <= tol or products >= limit:
                break
            shadow = residual if attempt == 0 else random_directions(1, b, seed=attempt)[0]
            candidate, spent = _iterate(operator, x, residual, shadow, tol * float(b.norm()), limit - products)
            # The residual of the recurrence drifts from the true one, so the true one is measured.
            after = b - operator(candidate)
            products += spent + 1
            if not bool(torch.isfinite(after).all()):
                raise BilevelError(
                    "BiCGSTAB met numbers that are not finite: the map has no derivative at w_T, or the iteration "
                    "diverged. Use GMRES(), whose residual never grows."
                )
            if relative(after, b) < measured:
                x, residual, measured = candidate, after, relative(after, b)
        return LinearSolution(x, measured, products, measured <= 10 * tol)


def _iterate(
    operator: Operator, x: Tensor, residual: Tensor, shadow: Tensor, target: float, limit: int
) -> tuple[Tensor, int]:
    """The best x by its recurrence, and the products spent. It ends at the target, a breakdown or the limit."""

    def preconditioned(vector: Tensor) -> Tensor:
        return vector if operator.inverse is None else operator.inverse(vector)

    tiny, products = torch.finfo(x.dtype).eps, 0
    best, least, start = x, float(residual.norm()), float(residual.norm())
    direction, rho = residual, torch.dot(shadow, residual)
    while products + 2 <= limit:
        ahead = preconditioned(direction)
        image = operator(ahead)
        products += 1
        along = torch.dot(shadow, image)
        if not along.abs() > tiny * shadow.norm() * image.norm():
            break
        length = rho / along
        half = residual - length * image
        ahead_half = preconditioned(half)
        second = operator(ahead_half)
        products += 1
        size = torch.dot(second, second)
        weight = torch.dot(second, half) / size if size > 0 else size
        x, residual = x + length * ahead + weight * ahead_half, half - weight * second
        norm = float(residual.norm())
        if norm < least:
            best, least = x, norm
        if not norm > target or not norm <= 1e8 * start:
            break
        before, rho = rho, torch.dot(shadow, residual)
        if not (rho.abs() > tiny * shadow.norm() * residual.norm() and weight.abs() > 0):
            break
        direction = residual + (rho / before) * (length / weight) * (direction - weight * image)
    return best, products
