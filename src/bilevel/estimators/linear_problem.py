"""Linear models on folds as bilevel problems for the engine; X is touched by products with it alone.

All folds are one inner problem: w has the shape (K, features, outputs), and λ is every feature's log penalty.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor
from torch.nn.functional import logsigmoid

from bilevel.estimators.folds import Array, Folds
from bilevel.problem import Problem, Task


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


@dataclass(frozen=True)
class LinearProblem:
    """L_k(w) = Σ_i s_ki loss(x_i w, y_i) + ½ Σ_j α_j ‖w_j‖² and E(w) = Σ_k Σ_i v_ki loss(x_i w, y_i)/Σ v.

    Attributes:
        loss: of scores and targets, one number for each row.
        mean_free: take scores about their mean over the training rows and drop the intercept, which is best that way;
            for squared errors of centred targets.
        free: features that are not penalised (the column of ones), at the end of X.
    """

    X: Any
    y: Tensor
    folds: Folds
    loss: Callable[[Tensor, Tensor], Tensor]
    outputs: int
    curvature: float
    mean_free: bool = False
    free: int = 0

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.folds.count, self.X.shape[1], self.outputs

    @property
    def task(self) -> Task:
        return Task(torch.from_numpy(self.folds.train_weights()), torch.from_numpy(self.folds.val_weights()))

    def scores(self, w: Tensor, train: Tensor) -> Tensor:
        """(K, rows, outputs)."""
        folds, features, outputs = w.shape
        flat = w.permute(1, 0, 2).reshape(features, folds * outputs)
        image = _product(self.X, flat)
        image = image.reshape(-1, folds, outputs).permute(1, 0, 2)
        if self.mean_free:
            share = (train / train.sum(1, keepdim=True))[:, :, None]
            image = image - (share * (image - self.y)).sum(1, keepdim=True)
        return image

    def problem(self, unit: Callable[[Tensor], Tensor] | None = None) -> Problem:
        """The problem in w, or in u with w = unit(λ)·u."""
        train_all = self.task.train
        total = self.folds.total

        def weights(u: Tensor, lam: Tensor) -> Tensor:
            return u if unit is None else u * unit(lam)[:, None]

        def inner(u: Tensor, lam: Tensor, train: Tensor) -> Tensor:
            w = weights(u, lam)
            penalised = w[:, : w.shape[1] - self.free]
            fit = (train * self.loss(self.scores(w, train), self.y)).sum()
            return fit + 0.5 * (lam.exp()[:, None] * penalised**2).sum() + self._gauge(w)

        def outer(u: Tensor, lam: Tensor, val: Tensor) -> Tensor:
            return (val * self.loss(self.scores(weights(u, lam), train_all), self.y)).sum() / total

        return Problem(inner, outer, init=lambda lam: torch.zeros(self.shape, dtype=lam.dtype))

    def _gauge(self, w: Tensor) -> Tensor | float:
        """Intercepts of several classes may all grow together without changing anything; their sum is kept at zero."""
        return 0.5 * (w[:, -self.free :].sum(2) ** 2).sum() if self.free and self.outputs > 1 else 0.0

    def unit(self) -> Callable[[Tensor], Tensor]:
        """The scale of u in which the inner objective curves about equally in every feature: Jacobi preconditioning."""
        squares = self.X.multiply(self.X) if sparse.issparse(self.X) else self.X**2
        size = torch.from_numpy(np.asarray(self.curvature * (self.folds.weight @ squares)).reshape(-1) + 1e-300)

        def scale(lam: Tensor) -> Tensor:
            own = torch.cat([lam.exp(), lam.new_zeros(self.free)])
            return (size + own).rsqrt()

        return scale


def squared_error(X: Any, y: Array, folds: Folds, intercept: bool) -> LinearProblem:
    """Ridge: loss ½(y − x w)², so that the objective is half of scikit-learn's."""
    return LinearProblem(
        X,
        torch.from_numpy(y),
        folds,
        lambda scores, y: 0.5 * ((scores - y) ** 2).sum(-1),
        y.shape[1],
        1.0,
        mean_free=intercept,
    )


def log_loss(X: Any, y: Array, folds: Folds, intercept: bool) -> LinearProblem:
    """Logistic regression; y is one column of 0 and 1 for two classes, or one indicator column for each of several."""
    free = int(intercept)
    return LinearProblem(
        with_ones(X) if intercept else X, torch.from_numpy(y), folds, _log_loss, y.shape[1], 0.25, free=free
    )


def _log_loss(scores: Tensor, y: Tensor) -> Tensor:
    if y.shape[1] > 1:
        return -(y * scores.log_softmax(-1)).sum(-1)
    return -logsigmoid((2 * y - 1) * scores).sum(-1)


def with_ones(X: Any) -> Any:
    """X with a column of ones at the end."""
    ones = np.ones((X.shape[0], 1))
    return sparse.hstack([X, sparse.csr_matrix(ones)]).tocsr() if sparse.issparse(X) else np.hstack([X, ones])
