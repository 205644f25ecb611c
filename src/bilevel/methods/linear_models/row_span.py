"""Linear models with a smooth loss in the span of the rows, for tables with more features than rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bilevel.engine.process import Process
from bilevel.methods.linear_models._at_minimiser import LinearModelMethod, Minimum, start_of
from bilevel.methods.linear_models.newton_linear import PenalisedRows, hessians_are_small, minimise
from bilevel.structures.linear_models import LinearModels
from bilevel.structures.losses import SquaredError
from bilevel.structures.rows import feature_sums, row_kernel, row_scores


@dataclass(frozen=True)
class RowSpan(LinearModelMethod):
    """Newton's method on as many coordinates as rows, for `LinearModels` with positive penalties.

    With the singular value decomposition X diag(α)^−½ = U Σ Qᵀ and v = Qᵀ diag(α)^½ w, the inner objective is that of
    the table UΣ with coefficients v and penalties of 1: a minimiser has no part outside the span of the rows. Hessians
    then have the size of the rows, whatever the number of features.

    Args:
        tol: as for `NewtonLinear`.
    """

    tol: float = 1e-8
    structure: ClassVar[type | None] = LinearModels

    def minimum(self, process: Process) -> Minimum:
        inner, bound = process.problem.inner, process.bound
        assert isinstance(inner, LinearModels)
        X, y, weight = bound.task.train
        span = _Span(X, self.positive_penalties(process), inner.intercept)
        unit = LinearModels(inner.loss, lambda table: table.new_ones(table.shape[1]), inner.intercept)
        rows = PenalisedRows(unit, (span.table, y, weight), span.table)
        v = span.coordinates(start_of(process))
        solver = rows.cholesky if hessians_are_small(len(span.table), v.shape) else rows.conjugate_gradients
        v, scores = minimise(rows, v, solver, self.tol)
        inverse = solver(scores)

        def solve(right: Tensor) -> Tensor:
            reduced = span.reduced(right)
            return span.full(right, inverse(reduced, self.tol, None) - reduced)

        block_diagonal = v.shape[1] == 1 or isinstance(inner.loss, SquaredError)
        return Minimum(span.coefficients(v), solve, block_diagonal, bytes=span.table.nbytes)


class _Span:
    """X diag(α)^−½ = U Σ Qᵀ. The maps change the coefficients in w; the last column, an intercept, stays as it is."""

    def __init__(self, X: Any, alpha: Tensor, intercept: bool) -> None:
        self.X, self.alpha, self.intercept = X, alpha, intercept
        squares, vectors = torch.linalg.eigh(row_kernel(X, 1 / alpha))
        # Below this, singular values are rounding errors; the largest one is always kept.
        kept = squares > (len(squares) * torch.finfo(squares.dtype).eps * squares[-1]).clamp(min=1e-300)
        kept[-1] = True
        self.sizes, self.vectors = squares[kept].clamp(min=1e-300).sqrt(), vectors[:, kept]
        self.table = self.vectors * self.sizes

    def _with_intercept(self, w: Tensor, coefficients: Tensor) -> Tensor:
        return torch.cat([coefficients, w[..., -1:]], -1) if self.intercept else coefficients

    def _coefficients_of(self, w: Tensor) -> Tensor:
        return w[..., :-1] if self.intercept else w

    def coordinates(self, w: Tensor) -> Tensor:
        """v = Qᵀ diag(α)^½ w."""
        return self._with_intercept(w, row_scores(self._coefficients_of(w), self.X) @ self.vectors / self.sizes)

    def reduced(self, slope: Tensor) -> Tensor:
        """Qᵀ diag(α)^−½ times a derivative in w: the derivative in v."""
        return self.coordinates(self._with_intercept(slope, self._coefficients_of(slope) / self.alpha))

    def coefficients(self, v: Tensor) -> Tensor:
        """w = diag(α)^−½ Q v."""
        return self._with_intercept(
            v, feature_sums(self._coefficients_of(v) / self.sizes @ self.vectors.mT, self.X) / self.alpha
        )

    def full(self, slope: Tensor, inside: Tensor) -> Tensor:
        """H⁻¹ times the slope, from `inside` = (H_v⁻¹ − I) times the reduced slope: outside the span, H is diag(α)."""
        found = self.coefficients(inside)
        coefficients = self._coefficients_of(slope) / self.alpha + self._coefficients_of(found)
        # The intercept is itself a coordinate of v. Adding its slope to `inside` gives H_v⁻¹ times the slope.
        return self._with_intercept(found + self._with_intercept(slope, torch.zeros_like(coefficients)), coefficients)
