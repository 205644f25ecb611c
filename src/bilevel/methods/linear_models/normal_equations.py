"""Penalised least squares by its normal equations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from bilevel.engine.method import Hypergradient
from bilevel.engine.process import Process
from bilevel.errors import BilevelError
from bilevel.methods.linear_models._at_minimiser import MinimiserMethod, Solver, by_leave_one_out, cholesky_solver
from bilevel.structures.least_squares import LeastSquares
from bilevel.structures.leave_one_out import LeaveOneOutSlopes
from bilevel.structures.rows import GramOfRows


@dataclass(frozen=True)
class NormalEquations(MinimiserMethod):
    """w_k = b_k A_k⁻¹ and q_k = ∇E_k A_k⁻¹ with A_k = G_k + diag(α), for `LeastSquares`.

    One Cholesky factor per fold serves the fit and its hypergradient, whatever the number of rows.
    """

    structure: ClassVar[type | None] = LeastSquares

    def check(self, process: Process) -> None:
        super().check(process)
        if isinstance(process.bound.task.train[0], GramOfRows):
            raise BilevelError("NormalEquations needs G as a tensor, not as a GramOfRows. Use Implicit(CG()).")

    def at_minimiser(self, process: Process) -> Hypergradient:
        inner, bound = process.problem.inner, process.bound
        assert isinstance(inner, LeastSquares)
        gram, moments = bound.task.train
        alpha, matrices = inner.penalty(bound.lam), gram.clone()
        if alpha.ndim == 1:
            matrices.diagonal(dim1=1, dim2=2).add_(alpha)
        else:
            matrices.add_(alpha)
        solve = cholesky_solver(matrices)
        w = solve(moments)
        if by_leave_one_out(process):
            return self._left_out(process, w, solve, alpha)
        value, slope, direct = self.outer_slope(process, w)
        q = solve(slope)
        through = None if alpha.ndim == 1 else -(q.mT @ w).sum(0)
        return self.combined(process, w, q, value, direct, penalty_slope=through, peak_memory=2 * matrices.nbytes)

    def _left_out(self, process: Process, w: Tensor, solve: Solver, alpha: Tensor) -> Hypergradient:
        X, y, weight, own, _ = process.bound.task.val
        Z = solve(X[None])[0]
        kept = 1 - own - weight * (Z * X).sum(1)
        found = LeaveOneOutSlopes.of(w[0], Z, y - w[0] @ X.mT, kept, weight)
        return self.left_out(process, found, alpha, peak_memory=2 * Z.nbytes)
