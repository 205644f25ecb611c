"""The leave-one-out loss of linear models with a smooth loss, by one Newton step for each row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bilevel.structures.held_out import DeclaredOuter
from bilevel.structures.linear_models import LinearModels
from bilevel.trees import Tree


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
        scores, rows = self.model.scores(w, X), with_ones(X, self.model.intercept)
        curvature = self.curvatures(scores, y, weight)
        blocks = torch.einsum("icd,ij,ik->cjdk", curvature, rows, rows)
        size, outputs = rows.shape[1], w.shape[1]
        hessian = blocks.reshape(outputs * size, -1) + torch.diag(self.model.penalties(lam, size).repeat(outputs))
        if self.model.gauge(w):
            ones = torch.zeros(outputs, size, dtype=w.dtype)
            ones[:, -1] = 1
            hessian = hessian + torch.outer(ones.reshape(-1), ones.reshape(-1))
        inverse = torch.linalg.inv(hessian).reshape(outputs, size, outputs, size)
        leverage = torch.einsum("ij,cjdk,ik->icd", rows, inverse, rows)
        return self.loss(scores, leverage, y, weight) + self.extra(lam, data)

    def curvatures(self, scores: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """V_i, of shape rows × outputs × outputs."""
        outputs = scores.shape[1]
        units = torch.eye(outputs, dtype=scores.dtype)
        columns = [self.model.loss.hessian_times(scores, y, unit[:, None].expand_as(scores))[0] for unit in units]
        return weight[0][:, None, None] * torch.stack(columns).permute(2, 0, 1)

    def loss(self, scores: Tensor, leverage: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """E without the extra term, from the scores (1 × outputs × rows) and A (rows × outputs × outputs)."""
        slope = (weight[:, None] * self.model.loss.slopes(scores, y))[0].mT[:, :, None]
        taken = self.curvatures(scores, y, weight) @ leverage
        kept = torch.eye(leverage.shape[1], dtype=scores.dtype) - taken
        change = leverage @ (slope / kept if kept.shape[1] == 1 else torch.linalg.solve(kept, slope))
        losses = (weight * self.model.loss.values(scores + change[:, :, 0].mT, y)).sum()
        return (losses + self.freedom * taken.diagonal(dim1=1, dim2=2).sum()) / weight.sum()


def with_ones(X: Tensor, intercept: bool) -> Tensor:
    """X, with a last column of ones for an intercept."""
    return torch.cat([X, X.new_ones(len(X), 1)], 1) if intercept else X
