"""Linear models on folds as bilevel problems for the engine; X is touched by products with it alone.

All folds are one inner problem: w has the shape (K, features, outputs), and λ is every feature's log penalty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from bilevel.estimators.folds import Array, Folds
from bilevel.estimators.losses import Loss
from bilevel.problem import Problem, Task


@dataclass(frozen=True)
class LinearProblem:
    """L_k(w) = Σ_i s_ki loss(x_i w, y_i) + ½ Σ_j α_j ‖w_j‖² and E(w) = Σ_k Σ_i v_ki loss(x_i w, y_i)/Σ v.

    Attributes:
        X: the features, dense or sparse; with `free`, a column of ones at the end.
        y: targets of shape (rows, outputs).
        free: whether the last column is an intercept, which is not penalised.
        centred: take scores about their mean over the training rows instead, and drop the intercept, which is best that
            way for squared errors.
    """

    X: Any
    y: Array
    folds: Folds
    loss: Loss
    free: bool = False
    centred: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.folds.count, self.X.shape[1], self.y.shape[1]

    @property
    def gauge(self) -> float:
        """Where only differences of scores count, intercepts may grow together; their sum is kept at zero."""
        return float(self.free and self.y.shape[1] > 1 and self.loss.only_differences)

    def for_engine(self) -> tuple[Problem, Task]:
        """The problem, and the weights of the rows as its task."""
        y, total = torch.from_numpy(self.y), self.folds.total
        everywhere = torch.from_numpy(self.folds.train_weights())

        def scores(w: Tensor) -> Tensor:
            folds, features, outputs = w.shape
            image = _product(self.X, w.permute(1, 0, 2).reshape(features, folds * outputs))
            image = image.reshape(-1, folds, outputs).permute(1, 0, 2)
            if self.centred:
                share = (everywhere / everywhere.sum(1, keepdim=True))[:, :, None]
                image = image - (share * (image - y)).sum(1, keepdim=True)
            return image

        def inner(w: Tensor, lam: Tensor, train: Tensor) -> Tensor:
            penalised = w[:, : len(lam)]
            fit = (train * self.loss.in_torch(scores(w), y)).sum() + 0.5 * (lam.exp()[:, None] * penalised**2).sum()
            return fit + 0.5 * (w[:, -1].sum(1) ** 2).sum() if self.gauge else fit

        def outer(w: Tensor, lam: Tensor, val: Tensor) -> Tensor:
            return (val * self.loss.in_torch(scores(w), y)).sum() / total

        problem = Problem(inner, outer, init=lambda lam: torch.zeros(self.shape, dtype=lam.dtype))
        return problem, Task(everywhere, torch.from_numpy(self.folds.val_weights()))


class SparseProduct(torch.autograd.Function):
    """X v or Xᵀ v for a sparse X of scipy's, differentiable in v as often as asked."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, X: Any, transposed: bool) -> Tensor:
        ctx.X, ctx.transposed = X, transposed
        return torch.from_numpy(np.ascontiguousarray((X.T if transposed else X) @ v.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        return SparseProduct.apply(slope, ctx.X, not ctx.transposed), None, None  # type: ignore[no-untyped-call]


def _product(X: Any, v: Tensor) -> Tensor:
    if sparse.issparse(X):
        return SparseProduct.apply(v, X, False)  # type: ignore[no-untyped-call]
    return torch.from_numpy(X) @ v


def with_ones(X: Any) -> Any:
    """X with a column of ones at the end."""
    ones = np.ones((X.shape[0], 1))
    return sparse.hstack([X, sparse.csr_matrix(ones)]).tocsr() if sparse.issparse(X) else np.hstack([X, ones])
