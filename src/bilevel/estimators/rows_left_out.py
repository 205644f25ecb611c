"""A table whose criterion is the leave-one-out error, in closed form."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from bilevel.engine.method import Method
from bilevel.estimators.folds import Array, Folds
from bilevel.estimators.hyperparameters import Grouping, Tether
from bilevel.estimators.optimism import HeldOutRows
from bilevel.estimators.tables import MOST, Curvature, FoldedTable, HeldOutScores, extremes
from bilevel.methods.linear_models._at_minimiser import Minimum
from bilevel.methods.linear_models.kernel_equations import KernelEquations
from bilevel.methods.linear_models.normal_equations import NormalEquations
from bilevel.problem import Problem, Task
from bilevel.structures.least_squares import LeastSquares
from bilevel.structures.leave_one_out import LeaveOneOut
from bilevel.structures.linear_models import LinearModels
from bilevel.structures.rows import row_kernel, weighted_gram

# Floating-point operations of one evaluation up to which rows are left out singly.
AFFORDABLE = 3e8


def affordable(shape: tuple[int, int]) -> bool:
    """Whether the closed form costs little enough for a table of this shape."""
    return shape[0] * shape[1] * min(shape) <= AFFORDABLE


class RowsLeftOut(FoldedTable):
    """Squared errors on each row by the ridge regression that is fitted to all others.

    Rows are about their weighted means, so that w has no intercept; its leverage is added.

    """

    def __init__(self, X: Any, y: Array, folds: Folds, groups: Grouping, intercept: bool) -> None:
        super().__init__(X.toarray() if sparse.issparse(X) else X, y, folds, groups, intercept)
        rows, features = X.shape
        self.wide = features > rows
        inner = LinearModels(penalty=self.penalties) if self.wide else LeastSquares(self.penalties)
        self.problem = Problem(
            inner,
            LeaveOneOut(self.penalties, Tether()),
            init=lambda lam: lam.new_zeros(1, len(self.y), features),
            check_derivatives=False,
        )
        self.reason = (
            "Implicit differentiation of the leave-one-out error in closed form, by "
            + (
                f"the kernel equations ({rows} × {rows})"
                if self.wide
                else f"the normal equations ({features} × {features})"
            )
            + ": one fit for all rows, and no random folds."
        )

    def method(self, tol: float) -> Method:
        return KernelEquations() if self.wide else NormalEquations()

    def task(self, folds: Folds, held: float = 0.0) -> Task:
        rows = torch.from_numpy(np.flatnonzero(folds.train_weights()[0]))
        X, y, weight = self.X[rows], self.y[:, rows], self.weight[rows]
        share = weight / weight.sum()
        if self.intercept:
            X, y = X - share @ X, y - (y @ share)[:, None]
        own = share if self.intercept else torch.zeros_like(share)
        val = (X, y, weight, own, torch.tensor(held, dtype=X.dtype))
        if self.wide:
            return Task((X, y, weight[None]), val)
        return Task((weighted_gram(X, weight)[None], ((weight * y) @ X)[None]), val)

    def held_out(self, minimum: Minimum, folds: Folds, lam: Tensor) -> HeldOutRows:
        """By the model without row i, whose inverse Hessian follows from that of all rows by one division."""
        X, y, weight, own, _ = self.task(folds).val
        every = -(-len(X) // MOST)
        order = y[0].argsort(stable=True)[::every]
        X, y, weight, own = X[order], y[:, order], weight[order], own[order]
        w, solved = minimum.w[0], minimum.solve(X[None])[0]
        kept = 1 - own - weight * (solved * X).sum(1)
        errors = (y - w @ X.mT) / kept
        # w of row i's own model, rows × outputs × features.
        without = w - (weight * errors).mT[:, :, None] * solved[:, None]
        slopes = -(solved / kept[:, None])[:, None] * without
        pulled = self.penalties.linearised(lam)[1](slopes)
        return HeldOutRows((y - errors).mT, pulled, y.mT, every * weight)

    def held_out_scores(self, w: Tensor, folds: Folds, lam: Tensor) -> HeldOutScores:
        rows = np.flatnonzero(folds.train_weights()[0])
        X, y, weight, own, _ = self.task(folds).val
        alpha, root = self.penalties(lam), weight.sqrt()[:, None]
        if self.wide:
            kernel = row_kernel(X, 1 / alpha) * root * root.mT
            kept = torch.linalg.inv(kernel + torch.eye(len(X), dtype=X.dtype)).diagonal() - own
        else:
            factor = torch.linalg.cholesky(weighted_gram(X, weight) + alpha.diag())
            kept = 1 - own - torch.linalg.solve_triangular(factor, (root * X).mT, upper=False).square().sum(0)
        mean = self.y[:, torch.from_numpy(rows)] - y
        return [(rows, (mean + y - (y - w[0] @ X.mT) / kept).mT.numpy())]

    def rows_of_folds(self, index: Tensor, folds: Folds) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("rows are left out singly")

    def start(self, task: Task) -> Tensor:
        return self.y.new_zeros(1, len(self.y), self.X.shape[1])

    def coefficients(self, w: Tensor, folds: Folds) -> tuple[Array, Array]:
        rows = torch.from_numpy(np.flatnonzero(folds.train_weights()[0]))
        share = self.weight[rows] / self.weight[rows].sum()
        intercept = self.y[:, rows] @ share - w[0] @ (share @ self.X[rows])
        return w[0].numpy().T, intercept.numpy() if self.intercept else np.zeros(len(self.y))

    def curvature(self, lam: Tensor, task: Task, w: Tensor) -> Curvature:
        alpha = self.penalties(lam)
        return (float(alpha.min()), None) if self.wide else extremes(task.train[0] + alpha.diag())

    def shared_values(self, levels: Tensor, task: Task) -> list[float]:
        """With S^½ X = U Σ Qᵀ, one matrix of rows × directions serves all penalties."""
        X, y, weight, own, _ = task.val
        root = weight.sqrt()
        if self.wide:
            squares, vectors = torch.linalg.eigh(row_kernel(X, X.new_ones(X.shape[1])) * root[:, None] * root)
        else:
            squares, basis = torch.linalg.eigh(task.train[0][0])
            vectors = (root[:, None] * X) @ basis / squares.clamp(min=1e-14 * float(squares[-1]) + 1e-300).sqrt()
        alpha = levels.exp()[:, None]
        lost = alpha / (squares.clamp(min=0) + alpha)
        # What a fit of any penalty leaves is that of none and the part of each direction that is lost.
        target = root * y
        parts = target @ vectors
        outside, free = target - parts @ vectors.mT, 1 - vectors.square().sum(1)
        kept = free.clamp(min=0) + lost @ vectors.square().mT - own
        residuals = outside + (parts * lost[:, None]) @ vectors.mT
        errors = (residuals / kept[:, None]).square().sum((1, 2))
        return (0.5 * errors / weight.sum()).tolist()
