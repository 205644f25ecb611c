"""The leave-one-out loss of linear models and its hypergradient, from one factorised Hessian."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bilevel.engine.method import Hypergradient
from bilevel.engine.process import Process
from bilevel.errors import BilevelError
from bilevel.methods.linear_models._at_minimiser import LinearModelMethod, Minimum, same_storage, start_of
from bilevel.methods.linear_models.newton_linear import (
    NewtonLinear,
    PenalisedRows,
    Solve,
    factorised,
    minimise,
    solved,
)
from bilevel.structures.data_checks import computes_as
from bilevel.structures.linear_models import LinearModels
from bilevel.structures.losses import RowLoss
from bilevel.structures.outer_objectives import LeftOutLoss, with_ones


@dataclass(frozen=True)
class NewtonLeftOut(LinearModelMethod):
    """Newton's method for `LinearModels` on one fold, then the gradient of a `LeftOutLoss` at the minimiser.

    E depends on λ through w_λ and through the Hessian H. With the derivatives B_i of E in A_i = X_i H⁻¹ X_iᵀ and
    M = H⁻¹ (Σ_i X_iᵀ B_i X_i) H⁻¹, the derivative of E in H is −M. In a penalty it is a diagonal entry of −M, and in
    the curvature V_i of a row it is −X_i M X_iᵀ.

    The Hessian at the minimiser for one λ is where Newton's method starts for the next: without its penalties it is in
    the result's `adjoint`, which `solve` passes on with `start="warm"`.

    Args:
        tol: a bound on the relative error of w.
    """

    tol: float = 1e-8
    structure: ClassVar[type | None] = LinearModels

    def check(self, process: Process) -> None:
        super().check(process)
        if not computes_as(process.problem.outer, LeftOutLoss) or process.encoded:
            raise BilevelError(
                "NewtonLeftOut is for problems whose `outer` is a bilevel.structures.LeftOutLoss, without `encode`. "
                "Use NewtonLinear() for other outer objectives."
            )
        if len(process.bound.task.train[2]) != 1:
            raise BilevelError("NewtonLeftOut needs one fold that has all rows; pass weights of shape 1 × rows.")

    def minimum(self, process: Process) -> Minimum:
        return NewtonLinear(self.tol, dense=True).minimum(process)

    def at_minimiser(self, process: Process) -> Hypergradient:
        inner, outer = process.problem.inner, process.problem.outer
        assert isinstance(inner, LinearModels) and isinstance(outer, LeftOutLoss)
        X, y, weight, _ = process.bound.task.val
        rows = PenalisedRows(inner, process.bound.task.train, process.bound.lam)
        start, data = start_of(process), (rows.X, rows.y, rows.weight)
        known: Any = process.adjoint
        if not (isinstance(known, LossHessian) and known.fits(inner, start, data)):
            known = None
        w, scores = minimise(rows, start, rows.cholesky, self.tol, None if known is None else known.solver(rows))
        columns, (outputs, size) = with_ones(X, inner.intercept), w.shape[1:]
        kept = LossHessian(w, rows.unpenalised_hessians(scores), inner.loss, data)
        inverse = torch.cholesky_inverse(kept.factors(rows)[0])
        leverage = _forms(columns, inverse, outputs)
        with torch.enable_grad():
            free_scores, free_leverage = scores.detach().requires_grad_(), leverage.requires_grad_()
            value = outer.loss(free_scores, free_leverage, y, weight)
            in_scores, in_leverage = torch.autograd.grad(value, (free_scores, free_leverage))
        spread = inverse @ _weighted_gram(columns, in_leverage) @ inverse
        in_curvature = -_forms(columns, 0.5 * (spread + spread.mT), outputs)
        with torch.enable_grad():
            through = (in_curvature * outer.curvatures(free_scores, y, weight)).sum()
            if through.requires_grad:
                (more,) = torch.autograd.grad(through, free_scores)
                in_scores = in_scores + more
        slope = inner.transposed(in_scores, X)
        q = (inverse @ slope.reshape(-1)).reshape(w.shape)
        in_penalty = -(q * w).sum((0, 1)) - spread.diagonal().reshape(outputs, size).sum(0)
        in_penalty = in_penalty[:-1] if inner.intercept else in_penalty
        memory = 4 * inverse.nbytes + 2 * columns.nbytes
        return self.from_adjoint(
            process, w, q, value.detach(), None, kept=kept, penalty_slope=in_penalty, peak_memory=memory
        )


@dataclass(frozen=True, eq=False)
class LossHessian:
    """The Hessian at w of the losses without penalties.

    Attributes:
        data: the tensors from which it was computed.
    """

    w: Tensor
    matrices: Tensor
    loss: RowLoss
    data: tuple[Tensor, ...]

    def fits(self, model: LinearModels, w: Tensor, data: tuple[Tensor, ...]) -> bool:
        """Whether it is the Hessian of this model's losses at w on these data."""
        return self.loss == model.loss and self.w.equal(w) and same_storage(self.data, data)

    def factors(self, rows: PenalisedRows) -> Tensor:
        """The Cholesky factors of the Hessian with the penalties of `rows`."""
        return factorised(rows.penalised(self.matrices.clone()))

    def solver(self, rows: PenalisedRows) -> Solve:
        factors = self.factors(rows)
        return lambda right, tol, start: solved(factors, right)


def _forms(columns: Tensor, matrix: Tensor, outputs: int) -> Tensor:
    """X_i matrix X_iᵀ for every row i, of shape rows × outputs × outputs; the matrix is symmetric."""
    size = columns.shape[1]
    found = columns.new_empty(len(columns), outputs, outputs)
    for a in range(outputs):
        for b in range(a, outputs):
            block = matrix[a * size : (a + 1) * size, b * size : (b + 1) * size]
            found[:, a, b] = found[:, b, a] = ((columns @ block) * columns).sum(1)
    return found


def _weighted_gram(columns: Tensor, factors: Tensor) -> Tensor:
    """Σ_i X_iᵀ B_i X_i for the symmetric part of every B_i of `factors`."""
    outputs = factors.shape[1]
    factors = 0.5 * (factors + factors.mT)
    # Block (b, a) equals block (a, b), and each is symmetric.
    half = {(a, b): columns.mT @ (factors[:, a, b, None] * columns) for a in range(outputs) for b in range(a, outputs)}
    return torch.cat([torch.cat([half[min(a, b), max(a, b)] for b in range(outputs)], 1) for a in range(outputs)])
