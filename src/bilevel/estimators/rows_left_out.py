"""The leave-one-out error of ridge regression as a criterion, in closed form."""

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
from bilevel.estimators.tables import MAX_TETHER_ROWS, Curvature, FoldedTable, HeldOutScores, extremes
from bilevel.methods.linear_models import Minimum
from bilevel.methods.linear_models.kernel_equations import KernelEquations
from bilevel.methods.linear_models.normal_equations import NormalEquations
from bilevel.problem import Problem, Task
from bilevel.structures.least_squares import LeastSquares
from bilevel.structures.linear_models import LinearModels
from bilevel.structures.outer_objectives import LeaveOneOut
from bilevel.structures.rows import row_kernel, weighted_gram

# The leave-one-out error is used if an evaluation takes at most this number of floating-point operations.
MAX_OPERATIONS = 3e8


def is_affordable(shape: tuple[int, int]) -> bool:
    """Whether the closed form is fast enough for a table of this shape."""
    return shape[0] * shape[1] * min(shape) <= MAX_OPERATIONS


class RowsLeftOut(FoldedTable):
    """The squared error on each row of the ridge regression that is fitted to all other rows.

    Rows are centred by their weighted means, so w has no intercept. The leverage of the intercept is added.
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

    def task(self, folds: Folds) -> Task:
        rows = torch.from_numpy(np.flatnonzero(folds.train_weights()[0]))
        X, y, weight = self.X[rows], self.y[:, rows], self.weight[rows]
        share = weight / weight.sum()
        if self.intercept:
            X, y = X - share @ X, y - (y @ share)[:, None]
        intercept_leverage = share if self.intercept else torch.zeros_like(share)
        val = (X, y, weight, intercept_leverage, X.new_zeros(()))
        if self.wide:
            return Task((X, y, weight[None]), val)
        return Task((weighted_gram(X, weight)[None], ((weight * y) @ X)[None]), val)

    def held_out(self, minimum: Minimum, folds: Folds, lam: Tensor) -> HeldOutRows:
        """Each row with the model of all other rows, from a rank-one update of the inverse Hessian."""
        X, y, weight, intercept_leverage, _ = self.task(folds).val
        stride = -(-len(X) // MAX_TETHER_ROWS)
        order = y[0].argsort(stable=True)[::stride]
        X, y, weight, intercept_leverage = X[order], y[:, order], weight[order], intercept_leverage[order]
        w, solved = minimum.w[0], minimum.solve(X[None])[0]
        complement = 1 - intercept_leverage - weight * (solved * X).sum(1)
        errors = (y - w @ X.mT) / complement
        # The w without row i, of shape rows × outputs × features.
        without = w - (weight * errors).mT[:, :, None] * solved[:, None]
        slopes = -(solved / complement[:, None])[:, None] * without
        pulled = self.penalties.linearised(lam)[1](slopes)
        return HeldOutRows((y - errors).mT, pulled, y.mT, stride * weight)

    def held_out_scores(self, w: Tensor, folds: Folds, lam: Tensor) -> HeldOutScores:
        rows = np.flatnonzero(folds.train_weights()[0])
        X, y, weight, intercept_leverage, _ = self.task(folds).val
        alpha, root = self.penalties(lam), weight.sqrt()[:, None]
        if self.wide:
            kernel = row_kernel(X, 1 / alpha) * root * root.mT
            # As in `KernelEquations`: an eigenvalue of 1 beside large ones would cost digits.
            raised, direction = kernel.diagonal().mean(), intercept_leverage.sqrt()
            kernel = kernel + raised * torch.outer(direction, direction) + torch.eye(len(X), dtype=X.dtype)
            complement = torch.linalg.inv(kernel).diagonal() - intercept_leverage / (1 + raised)
        else:
            factor = torch.linalg.cholesky(weighted_gram(X, weight) + alpha.diag())
            complement = (
                1
                - intercept_leverage
                - torch.linalg.solve_triangular(factor, (root * X).mT, upper=False).square().sum(0)
            )
        mean = self.y[:, torch.from_numpy(rows)] - y
        return [(rows, (mean + y - (y - w[0] @ X.mT) / complement).mT.numpy())]

    def rows_of_folds(self, index: Tensor, folds: Folds) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("a leave-one-out criterion has no folds")

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
        """f at every penalty from one decomposition S^½ X = U Σ Qᵀ."""
        X, y, weight, intercept_leverage, _ = task.val
        root = weight.sqrt()
        if self.wide:
            squares, vectors = torch.linalg.eigh(row_kernel(X, X.new_ones(X.shape[1])) * root[:, None] * root)
        else:
            squares, basis = torch.linalg.eigh(task.train[0][0])
            vectors = (root[:, None] * X) @ basis / squares.clamp(min=1e-14 * float(squares[-1]) + 1e-300).sqrt()
        alpha = levels.exp()[:, None]
        shrunk = alpha / (squares.clamp(min=0) + alpha)
        # The residual of a ridge fit is that of least squares, plus the fraction `shrunk` of every direction.
        target = root * y
        parts = target @ vectors
        outside, free = target - parts @ vectors.mT, 1 - vectors.square().sum(1)
        complement = free.clamp(min=0) + shrunk @ vectors.square().mT - intercept_leverage
        residuals = outside + (parts * shrunk[:, None]) @ vectors.mT
        errors = (residuals / complement[:, None]).square().sum((1, 2))
        return (0.5 * errors / weight.sum()).tolist()
