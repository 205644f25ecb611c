"""The truncated Neumann series (Lorraine, Vicol and Duvenaud, 2020)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from typing_extensions import Self

from bilevel.errors import BilevelError
from bilevel.linear_solvers.base import LinearSolution, LinearSolver, as_operator, relative
from bilevel.linear_solvers.fixed_point import relaxation


@dataclass(frozen=True)
class Neumann(LinearSolver):
    """x = ω Σ_{k < terms} (I − ωA)ᵏ b, at a fixed number of products; the residual says how accurate it is.

    From a warm start x0 the same number of terms approximates the correction A⁻¹(b − A x0).
    """

    terms: int = 100
    step: float | None = None

    advice: ClassVar[str] = "Raise terms, or use CG() if the matrix is symmetric."

    def solve(self, matvec: Callable[[Tensor], Tensor], b: Tensor, x0: Tensor | None = None) -> LinearSolution:
        if self.terms < 1:
            raise BilevelError(f"Neumann(terms={self.terms}) has no terms to add up; pass terms ≥ 1.")
        operator = as_operator(matvec)
        omega, products = relaxation(operator, b, self.step)
        x = omega * b if x0 is None else x0 + omega * (b - operator(x0))
        for _ in range(self.terms - 1):
            x = x + omega * (b - operator(x))
        residual = relative(b - operator(x), b)
        # After a warm start the residual may be that of the start, which later calls reduce.
        if x0 is None and not residual <= 1:
            raise BilevelError(
                f"The Neumann series diverges: after {self.terms} terms its relative residual is {residual:.2g}, and 0 "
                "terms have 1. Pass a smaller step, or use CG() if the matrix is symmetric, GMRES() if it is not."
            )
        # The caller chooses the accuracy by `terms`, so only a residual of a tenth or more counts as not converged.
        return LinearSolution(x, residual, products + self.terms + (x0 is not None), residual < 0.1)

    @classmethod
    def examples(cls) -> list[Self]:
        return [cls(terms=400)]
