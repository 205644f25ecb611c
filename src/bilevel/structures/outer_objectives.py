"""Outer objectives that declare their structure: the loss of linear models on rows that they were not fitted to.

`HeldOutLoss` and `HeldOutSquares` are losses on the rows that folds hold out. `LeaveOneOut` and `LeftOutLoss` are
leave-one-out losses, in closed form for squared errors and by one Newton step for each row for other losses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bilevel.structures.data_checks import refuse_asymmetric
from bilevel.structures.linear_models import LinearModels
from bilevel.structures.penalties import code_of
from bilevel.structures.rows import weighted_gram
from bilevel.trees import Tree


class DeclaredOuter(ABC):
    """An outer objective with a term extra(λ). The last entry of the batch is the data that `extra(lam, data)` takes.

    An `extra` that is a `FunctionOfLam` is differentiated without autograd.
    """

    extra: Callable[[Tree, Any], Tensor]

    def code(self) -> tuple[Any, ...] | None:
        """What the checks of this objective depend on besides the data; see `code_of`."""
        return code_of(self, self.extra)

    def check(self, batch: Any) -> None:  # noqa: B027 - most have nothing to refuse
        """Refuse data for which the hand-written derivatives do not hold."""

    @abstractmethod
    def __call__(self, w: Tensor, lam: Tree, batch: Any) -> Tensor:
        """E(w, λ)."""


class HeldOut(DeclaredOuter):
    """E(w, λ) = loss(w) + extra(λ)."""

    def __call__(self, w: Tensor, lam: Tree, batch: Any) -> Tensor:
        return self.loss(w, batch) + self.extra(lam, batch[-1])

    @abstractmethod
    def loss(self, w: Tensor, batch: Any) -> Tensor:
        """The terms that depend on w."""

    @abstractmethod
    def loss_and_slope(self, w: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """The loss and its derivative; called under `torch.no_grad`."""


@dataclass(frozen=True)
class HeldOutLoss(HeldOut):
    """Σ_k Σ_i v_ki loss(x_i w_k, y_i) / Σ v + extra(λ), with the batch (X, y, v, data)."""

    model: LinearModels
    extra: Callable[[Tree, Any], Tensor]

    def code(self) -> tuple[Any, ...] | None:
        model = self.model.code()
        return None if model is None else code_of(self, self.extra, model=model)

    def check(self, batch: Any) -> None:
        self.model.check(batch)

    def loss(self, w: Tensor, batch: Any) -> Tensor:
        self.check(batch)
        X, y, weight, _ = batch
        return (weight * self.model.loss.values(self.model.scores(w, X), y)).sum() / weight.sum()

    def loss_and_slope(self, w: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        X, y, weight, _ = batch
        share, scores = weight / weight.sum(), self.model.scores(w, X)
        slope = self.model.transposed(share[:, None] * self.model.loss.slopes(scores, y), X)
        return (share * self.model.loss.values(scores, y)).sum(), slope


@dataclass(frozen=True)
class HeldOutSquares(HeldOut):
    """½ Σ_k ⟨w_k, w_k G_k⟩ − 2⟨b_k, w_k⟩ + c + extra(λ): squared errors given by sums over rows.

    The batch is (G, b, c, data), the sums XᵀVX, yᵀVX and yᵀVy over the rows that are held out, divided by their weight.
    """

    extra: Callable[[Tree, Any], Tensor]

    def check(self, batch: Any) -> None:
        refuse_asymmetric(batch[0], "The matrix G of the outer objective")

    def loss(self, w: Tensor, batch: Any) -> Tensor:
        gram, moments, constant, _ = batch
        return 0.5 * ((w * (w @ gram - 2 * moments)).sum() + constant)

    def loss_and_slope(self, w: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        gram, moments, constant, _ = batch
        slope = w @ gram - moments
        return 0.5 * ((w * (slope - moments)).sum() + constant), slope


@dataclass(frozen=True)
class LeaveOneOut(DeclaredOuter):
    """E(w, λ) = Σ_i (½ s_i ‖e_i‖² + c h_i) / Σ s + extra(λ): the error on each row of the fit to all other rows.

    e_i = (y_i − x_i w) / (1 − o_i − h_i) with the leverage h_i = s_i x_i A⁻¹ x_iᵀ and A = XᵀSX + diag(α). This holds
    for the w that minimises the squared errors of all rows with the same penalties.

    The batch is (X, y, s, o, data): rows × features, outputs × rows, and two numbers for each row: its positive weight
    and the leverage of an intercept, s_i / Σ s if X and y are about their weighted means, and zero otherwise. w has one
    fold. `NormalEquations` and `KernelEquations` differentiate it without autograd.

    Args:
        penalty: α as a function of λ, that of the inner objective. One number for every feature, or a matrix of
            features × features in the place of diag(α).
        extra: a function of λ and of `data` that is added.
        freedom: c, an additional cost of every degree of freedom, in units of ‖e‖². With 0, E is the leave-one-out
            error itself, in which a degree of freedom costs about ‖e‖². Many penalties can overfit that error.
    """

    penalty: Callable[[Tree], Tensor]
    extra: Callable[[Tree, Any], Tensor]
    freedom: float = 0.0

    def code(self) -> tuple[Any, ...] | None:
        return code_of(self, self.penalty, self.extra)

    def __call__(self, w: Tensor, lam: Tree, batch: Any) -> Tensor:
        X, y, weight, of_intercept, data = batch
        alpha = self.penalty(lam)
        matrix = weighted_gram(X, weight) + (alpha if alpha.ndim == 2 else alpha.expand(X.shape[1]).diag())
        inverse = torch.cholesky_solve(X.mT, torch.linalg.cholesky(matrix)).mT
        leverage = weight * (inverse * X).sum(1)
        error = squared_error((y - w[0] @ X.mT) / (1 - of_intercept - leverage), weight)
        return error + self.freedom * leverage.sum() / weight.sum() + self.extra(lam, data)


def squared_error(errors: Tensor, weight: Tensor) -> Tensor:
    """½ Σ_i s_i ‖e_i‖² / Σ s for errors of shape outputs × rows."""
    return 0.5 * (weight * errors.square()).sum() / weight.sum()


@dataclass(frozen=True, eq=False)
class LeaveOneOutSlopes:
    """E without the extra term, and its derivative in the matrix A.

    With the rows z_i of Z = X A⁻¹, a change dA changes the residuals by z_i dA wᵀ and the leverages by
    −s_i z_i dA z_iᵀ.

    Attributes:
        value: E without the extra term.
        adjoint: A⁻¹ ∇_w E, outputs × features.
        spread: the factor of z_i dA z_iᵀ for every row.
    """

    w: Tensor
    value: Tensor
    adjoint: Tensor
    spread: Tensor
    Z: Tensor

    @classmethod
    def of(
        cls, w: Tensor, Z: Tensor, residuals: Tensor, kept: Tensor, of_intercept: Tensor, weight: Tensor, freedom: float
    ) -> LeaveOneOutSlopes:
        """From the minimiser w (outputs × features), Z, y − w Xᵀ, 1 − o − h, o, s and c."""
        errors, share = residuals / kept, weight / weight.sum()
        value = squared_error(errors, weight) + freedom * (1 - of_intercept - kept).sum() / weight.sum()
        adjoint = -((share * errors / kept) @ Z)
        spread = -share * (weight * errors.square().sum(0) / kept + freedom)
        return cls(w, value, adjoint, spread, Z)

    def in_diagonal(self) -> Tensor:
        """The derivative in each diagonal entry of A."""
        return self.spread @ self.Z.square() - (self.adjoint * self.w).sum(0)

    def in_matrix(self) -> Tensor:
        """The derivative in A, features × features; symmetric, as changes of A are."""
        cross = self.adjoint.mT @ self.w
        return self.Z.mT @ (self.spread[:, None] * self.Z) - 0.5 * (cross + cross.mT)

    def in_penalty(self, alpha: Tensor) -> Tensor:
        """The derivative in α, numbers or a matrix."""
        return self.in_diagonal() if alpha.ndim == 1 else self.in_matrix()


@dataclass(frozen=True)
class LeftOutLoss(DeclaredOuter):
    """E(w, λ) = Σ_i [s_i loss(η_i + A_i (I − V_i A_i)⁻¹ g_i, y_i) + c tr(V_i A_i)] / Σ s + extra(λ).

    The batch is (X, y, s, data).

    η_i are the scores of row i at the minimiser w of all rows, g_i = s_i ∇loss and V_i = s_i ∇²loss there, and
    A_i = X_i H⁻¹ X_iᵀ with the Hessian H of the inner objective. The argument of the loss is the score of row i after
    one Newton step on the objective without row i. That is the exact score for squared errors, and the approximate
    leave-one-out of Rad and Maleki (2020) for others. w and s have one fold. `NewtonLeftOut` differentiates it without
    autograd of the Hessian.

    Args:
        model: the inner objective.
        extra: a function of λ and of `data` that is added.
        freedom: c, an additional cost of every degree of freedom. In the loss itself it costs about 1/n.
    """

    model: LinearModels
    extra: Callable[[Tree, Any], Tensor]
    freedom: float = 0.0

    def check(self, batch: Any) -> None:
        self.model.check(batch)

    def __call__(self, w: Tensor, lam: Tree, batch: Any) -> Tensor:
        self.check(batch)
        X, y, weight, data = batch
        scores = self.model.scores(w, X)
        return self.loss(scores, self.leverages(scores, w, lam, batch), y, weight) + self.extra(lam, data)

    def scores(self, w: Tensor, lam: Tree, batch: Any) -> Tensor:
        """The scores of every row after one Newton step on the objective without that row, of shape outputs × rows."""
        X, y, weight, _ = batch
        scores = self.model.scores(w, X)
        return scores[0] + self.change(scores, self.leverages(scores, w, lam, batch), y, weight)[0].mT

    def leverages(self, scores: Tensor, w: Tensor, lam: Tree, batch: Any) -> Tensor:
        """A_i, of shape rows × outputs × outputs."""
        X, y, weight, _ = batch
        rows, curvature = with_ones(X, self.model.intercept), self.curvatures(scores, y, weight)
        blocks = torch.einsum("icd,ij,ik->cjdk", curvature, rows, rows)
        size, outputs = rows.shape[1], w.shape[1]
        hessian = blocks.reshape(outputs * size, -1) + torch.diag(self.model.penalties(lam, size).repeat(outputs))
        if self.model.gauge(w):
            ones = torch.zeros(outputs, size, dtype=w.dtype, device=w.device)
            ones[:, -1] = 1
            hessian = hessian + torch.outer(ones.reshape(-1), ones.reshape(-1))
        inverse = torch.linalg.inv(hessian).reshape(outputs, size, outputs, size)
        return torch.einsum("ij,cjdk,ik->icd", rows, inverse, rows)

    def curvatures(self, scores: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """V_i, of shape rows × outputs × outputs."""
        return weight[0][:, None, None] * self.model.loss.hessians(scores, y)

    def loss(self, scores: Tensor, leverage: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """E without the extra term, from the scores (1 × outputs × rows) and A (rows × outputs × outputs)."""
        change, taken = self.change(scores, leverage, y, weight)
        losses = (weight * self.model.loss.values(scores + change.mT, y)).sum()
        return (losses + self.freedom * taken.diagonal(dim1=1, dim2=2).sum()) / weight.sum()

    def change(self, scores: Tensor, leverage: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """What the Newton step without row i adds to its scores, rows × outputs; and V_i A_i."""
        slope = (weight[:, None] * self.model.loss.slopes(scores, y))[0].mT[:, :, None]
        taken = self.curvatures(scores, y, weight) @ leverage
        kept = torch.eye(leverage.shape[1], dtype=scores.dtype, device=scores.device) - taken
        change = leverage @ (slope / kept if kept.shape[1] == 1 else torch.linalg.solve(kept, slope))
        return change[:, :, 0], taken


def with_ones(X: Tensor, intercept: bool) -> Tensor:
    """X, with a last column of ones for an intercept."""
    return torch.cat([X, X.new_ones(len(X), 1)], 1) if intercept else X
