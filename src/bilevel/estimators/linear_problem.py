"""Linear models on folds: products with X, and the same as a bilevel problem for the engine, which needs no more.

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
        X: the features, dense or sparse.
        y: targets of shape (rows, outputs).
        free: whether w ends with an intercept, which is not penalised. No column of ones is kept for it: a copy of a
            large X costs as much as fifty products with it.
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
        return self.folds.count, self.X.shape[1] + self.free, self.y.shape[1]

    @property
    def gauge(self) -> float:
        """Where only differences of scores count, intercepts may grow together; their sum is kept at zero."""
        return float(self.free and self.y.shape[1] > 1 and self.loss.only_differences)

    def scores(self, w: Array) -> Array:
        """X w of shape (rows, K, outputs) for w of shape (K, features, outputs), intercepts added."""
        columns = w[:, : self.X.shape[1]].transpose(1, 0, 2)
        image = (self.X @ columns.reshape(len(columns), -1)).reshape(-1, len(w), w.shape[2])
        return image + w[:, -1] if self.free else image

    def transposed(self, v: Array) -> Array:
        """Xᵀv of shape (K, features, outputs) for v of shape (rows, K, outputs), sums for the intercepts."""
        flat = v.reshape(len(v), -1)
        # BLAS multiplies a few long rows from the left faster than as many columns from the right.
        image = (self.X.T @ flat).T if sparse.issparse(self.X) else np.ascontiguousarray(flat.T) @ self.X
        image = image.reshape(*v.shape[1:], -1).transpose(0, 2, 1)
        return np.concatenate([image, v.sum(0)[:, None]], axis=1) if self.free else image

    def for_engine(self) -> tuple[Problem, Task]:
        """The problem, and the weights of the rows as its task."""
        y, total = torch.from_numpy(self.y), self.folds.total
        everywhere = torch.from_numpy(self.folds.train_weights())

        def scores(w: Tensor) -> Tensor:
            folds, _, outputs = w.shape
            rows = w.permute(0, 2, 1)[..., : self.X.shape[1]].reshape(folds * outputs, -1)
            image = _product(rows, self.X).reshape(folds, outputs, -1).permute(0, 2, 1)
            if self.free:
                image = image + w[:, -1:]
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
    """v Xᵀ or v X for a sparse X of scipy's, differentiable in v as often as asked."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, X: Any, transposed: bool) -> Tensor:
        ctx.X, ctx.transposed = X, transposed
        image = (X if transposed else X.T).T @ v.detach().numpy().T
        return torch.from_numpy(np.ascontiguousarray(image.T))

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        return SparseProduct.apply(slope, ctx.X, not ctx.transposed), None, None  # type: ignore[no-untyped-call]


def _product(v: Tensor, X: Any) -> Tensor:
    """v Xᵀ; torch multiplies a few long rows from the left much faster than as many columns from the right."""
    if sparse.issparse(X):
        return SparseProduct.apply(v, X, False)  # type: ignore[no-untyped-call]
    return v @ torch.from_numpy(X).T
