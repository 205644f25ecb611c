"""Products with a table X of rows × features, a tensor or a scipy sparse matrix, for many folds at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


def row_scores(w: Tensor, X: Any) -> Tensor:
    """w Xᵀ of shape folds × outputs × rows, for w of shape folds × outputs × features."""
    flat = w.reshape(-1, w.shape[-1])
    image = flat @ X.mT if isinstance(X, Tensor) else SparseProduct.apply(flat, X.T)  # type: ignore[no-untyped-call]
    return image.reshape(*w.shape[:-1], -1)


def feature_sums(v: Tensor, X: Any) -> Tensor:
    """v X of shape folds × outputs × features, for v of shape folds × outputs × rows."""
    flat = v.reshape(-1, v.shape[-1])
    image = flat @ X if isinstance(X, Tensor) else SparseProduct.apply(flat, X)  # type: ignore[no-untyped-call]
    return image.reshape(*v.shape[:-1], -1)


def weighted_gram(X: Any, weight: Tensor) -> Tensor:
    """Xᵀ diag(weight) X as a dense tensor."""
    if isinstance(X, Tensor):
        return X.mT @ (X * weight[:, None])
    return torch.from_numpy((X.T @ X.multiply(weight.numpy()[:, None])).toarray())


class SparseProduct(torch.autograd.Function):
    """v A for a scipy sparse matrix A, differentiable in v any number of times."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, matrix: Any) -> Tensor:
        ctx.matrix = matrix
        return torch.from_numpy(np.ascontiguousarray((matrix.T @ v.detach().numpy().T).T))

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return SparseProduct.apply(slope, ctx.matrix.T), None  # type: ignore[no-untyped-call]


@dataclass(frozen=True, eq=False)
class GramOfRows:
    """G_k = Xᵀ diag(share_k) X − mean_k mean_kᵀ for every fold k, as products only: for tables with many features.

    Attributes:
        share: the weights of the rows, folds × rows.
        mean: the means that are subtracted, folds × features; zero if nothing is centred.
    """

    X: Any
    share: Tensor
    mean: Tensor

    def times(self, w: Tensor) -> Tensor:
        """w_k G_k for w of shape folds × outputs × features."""
        image = feature_sums(self.share[:, None] * row_scores(w, self.X), self.X)
        return image - (w @ self.mean[:, :, None]) * self.mean[:, None]

    def diagonal(self) -> Tensor:
        """The diagonals, folds × features."""
        squares = self.X.square() if isinstance(self.X, Tensor) else self.X.multiply(self.X).tocsr()
        return feature_sums(self.share[:, None], squares)[:, 0] - self.mean.square()

    def fold(self, k: int) -> GramOfRows:
        return GramOfRows(self.X, self.share[k : k + 1], self.mean[k : k + 1])

    def blocks(self, columns: Tensor) -> Tensor:
        """The entries of G in the rows and columns that `columns`, folds × outputs × size, lists."""
        found = [
            weighted_gram(self.X[:, some.numpy()], share) - torch.outer(mean[some], mean[some])
            for share, mean, outputs in zip(self.share, self.mean, columns, strict=True)
            for some in outputs
        ]
        blocks = torch.stack(found)
        return blocks.reshape(*columns.shape[:2], *blocks.shape[1:])


def row_kernel(X: Any, scale: Tensor) -> Tensor:
    """X diag(scale) Xᵀ as a dense tensor."""
    if isinstance(X, Tensor):
        scaled = X * scale.sqrt()
        return scaled @ scaled.mT
    return torch.from_numpy((X.multiply(scale.numpy()) @ X.T).toarray())
