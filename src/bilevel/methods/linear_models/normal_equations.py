"""Penalised least squares by its normal equations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from bilevel.engine.method import Hypergradient
from bilevel.engine.process import Process
from bilevel.errors import BilevelError
from bilevel.methods.linear_models._at_minimiser import (
    LinearModelMethod,
    Minimum,
    declared_leave_one_out,
    flattened,
    solver_by_fold,
)
from bilevel.structures.data_checks import refuse_asymmetric
from bilevel.structures.least_squares import LeastSquares
from bilevel.structures.outer_objectives import LeaveOneOutSlopes
from bilevel.structures.rows import GramOfRows


@dataclass(frozen=True)
class NormalEquations(LinearModelMethod):
    """w_k = b_k A_k⁻¹ and q_k = ∇E_k A_k⁻¹ with A_k = G_k + diag(α), for `LeastSquares`.

    One Cholesky factor per fold serves the fit and its hypergradient, whatever the number of rows.
    """

    structure: ClassVar[type | None] = LeastSquares

    def check(self, process: Process) -> None:
        super().check(process)
        if isinstance(process.bound.task.train[0], GramOfRows):
            raise BilevelError("NormalEquations needs G as a tensor, not as a GramOfRows. Use Implicit(CG()).")

    def minimum(self, process: Process) -> Minimum:
        inner, bound = process.problem.inner, process.bound
        assert isinstance(inner, LeastSquares)
        gram, moments = bound.task.train
        alpha = inner.penalty(bound.lam)

        def matrices(folds: slice) -> Tensor:
            found: Tensor = gram[folds].clone()
            if alpha.ndim == 1:
                found.diagonal(dim1=1, dim2=2).add_(alpha)
            else:
                found.add_(alpha)
            return found

        solve = flattened(solver_by_fold(len(gram), gram.shape[-1], matrices))
        return Minimum(solve(moments), solve, bytes=2 * gram.nbytes)

    def at_minimiser(self, process: Process) -> Hypergradient:
        inner: Any = process.problem.inner
        alpha = inner.penalty(process.bound.lam)
        if alpha.ndim == 2:
            refuse_asymmetric(alpha, "The matrix penalty(λ) of a LeastSquares")
        if (outer := declared_leave_one_out(process)) is not None:
            return self._left_out(process, self.minimum(process), alpha, outer.freedom)
        if alpha.ndim == 1:
            return super().at_minimiser(process)
        found = self.minimum(process)
        value, slope, direct = self.outer_slope(process, found.w)
        q = found.solve(slope)
        through = -(q.mT @ found.w).sum(0)
        # α is symmetric, and so are its changes.
        through = 0.5 * (through + through.mT)
        return self.from_adjoint(process, found.w, q, value, direct, penalty_slope=through, peak_memory=found.bytes)

    def _left_out(self, process: Process, found: Minimum, alpha: Tensor, freedom: float) -> Hypergradient:
        X, y, weight, of_intercept, _ = process.bound.task.val
        w, Z = found.w[0], found.solve(X[None])[0]
        kept = 1 - of_intercept - weight * (Z * X).sum(1)
        slopes = LeaveOneOutSlopes.of(w, Z, y - w @ X.mT, kept, of_intercept, weight, freedom)
        return self.left_out(process, slopes, alpha, peak_memory=found.bytes + Z.nbytes)
