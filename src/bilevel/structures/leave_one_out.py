"""The leave-one-out error of penalised least squares, in closed form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bilevel.structures.held_out import DeclaredOuter
from bilevel.structures.penalties import code_of
from bilevel.structures.rows import weighted_gram
from bilevel.trees import Tree


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
        X, y, weight, own, data = batch
        alpha = self.penalty(lam)
        matrix = weighted_gram(X, weight) + (alpha if alpha.ndim == 2 else alpha.expand(X.shape[1]).diag())
        inverse = torch.cholesky_solve(X.mT, torch.linalg.cholesky(matrix)).mT
        leverage = weight * (inverse * X).sum(1)
        error = squared_error((y - w[0] @ X.mT) / (1 - own - leverage), weight)
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
        cls, w: Tensor, Z: Tensor, residuals: Tensor, kept: Tensor, own: Tensor, weight: Tensor, freedom: float
    ) -> LeaveOneOutSlopes:
        """From the minimiser w (outputs × features), Z, y − w Xᵀ, 1 − o − h, o, s and c."""
        errors, share = residuals / kept, weight / weight.sum()
        value = squared_error(errors, weight) + freedom * (1 - own - kept).sum() / weight.sum()
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
