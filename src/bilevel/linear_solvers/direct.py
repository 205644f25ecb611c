"""The dense solution, for small problems and as a reference for the other solvers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bilevel.errors import BilevelError
from bilevel.linear_solvers.base import LinearSolution, LinearSolver, as_operator, relative


@dataclass(frozen=True)
class Direct(LinearSolver):
    """Build A from its products with unit vectors, then factorise it. A warm start is ignored.

    Args:
        largest: refuse systems with more unknowns than this, which would take largest² numbers of memory.
    """

    largest: int = 5000

    advice: ClassVar[str] = (
        "The matrix is nearly singular: add an L2 term to the inner objective, or use Reverse(), which needs no system."
    )

    def solve(self, matvec: Callable[[Tensor], Tensor], b: Tensor, x0: Tensor | None = None) -> LinearSolution:
        size = b.numel()
        if size > self.largest:
            raise BilevelError(
                f"Direct() would build a {size} × {size} matrix, and its limit is {self.largest}. Use CG() or "
                "Nystrom(), or raise the limit with Direct(largest=…)."
            )
        operator = as_operator(matvec)
        matrix = operator.rows(torch.eye(size, dtype=b.dtype, device=b.device)).T
        try:
            x = torch.linalg.solve(matrix, b)
        except RuntimeError as error:
            raise BilevelError(
                "Direct() found a singular matrix: the inner problem has no unique minimiser at w_T. Add an L2 term to "
                "the inner objective, or use Reverse()."
            ) from error
        residual = relative(b - operator(x), b)
        return LinearSolution(x, residual, size + 1, residual < 1e3 * size * torch.finfo(b.dtype).eps)
