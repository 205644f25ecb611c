"""Losses of scores on the rows of a table."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from bilevel.engine.method import Method
from bilevel.estimators.folds import Array, Folds
from bilevel.estimators.hyperparameters import Grouping, Tether
from bilevel.estimators.tables import CERTIFIED, LARGEST, Curvature, FoldedTable, extremes
from bilevel.methods.linear_models.kernel_equations import KernelEquations
from bilevel.methods.linear_models.newton_linear import NewtonLinear, PenalisedRows, hessians_are_small
from bilevel.methods.linear_models.row_span import RowSpan
from bilevel.methods.linear_models.stale_newton import StaleNewton
from bilevel.problem import Problem, Task
from bilevel.structures.held_out import HeldOutLoss
from bilevel.structures.linear_models import LinearModels
from bilevel.structures.losses import RowLoss, SquaredError
from bilevel.structures.rows import feature_sums

# Up to so many rows, models are fitted in the span of the rows where features outnumber them.
SPAN = 1000


class RowsOfTable(FoldedTable):
    """A loss of scores on rows, with an intercept in w: for wide tables, and for losses without closed form.

    Args:
        mean: a fold's objective has the mean of the losses, not their sum.
    """

    def __init__(
        self, X: Any, y: Array, folds: Folds, groups: Grouping, intercept: bool, loss: RowLoss, mean: bool = False
    ) -> None:
        super().__init__(X, y, folds, groups, intercept)
        self.mean = mean
        self.loss, self.model = loss, LinearModels(loss, self.penalties, intercept)
        (rows, features), outputs = X.shape, len(self.y)
        shape = torch.Size((folds.count, outputs, features + intercept))
        size, self.kernel = shape[1] * shape[2], isinstance(loss, SquaredError) and rows <= LARGEST
        self.problem = Problem(
            self.model,
            HeldOutLoss(self.model, Tether()),
            init=lambda lam: lam.new_zeros(1, *shape[1:]),
            check_derivatives=False,
        )
        self.dense = hessians_are_small(rows, shape)
        self.span = not self.kernel and rows < features and rows <= SPAN
        # Whether factors of Hessians cost less than the products with X that they save.
        self.stale = not self.dense and not sparse.issparse(X) and size <= min(20 * rows**0.5, LARGEST)
        self.factorises = self.dense or self.kernel or self.span or self.stale
        if self.kernel:
            self.reason = (
                f"Implicit differentiation of the kernel equations (up to {rows} × {rows}, one Cholesky factor per "
                f"fold): features ({features}) outnumber rows."
            )
            return
        if self.span:
            self.reason = (
                f"Implicit differentiation at the minimiser that Newton's method finds in the span of the {rows} rows: "
                f"features ({features}) outnumber them."
            )
            return
        self.reason = "Implicit differentiation at the minimiser" + (
            f" that Newton's method finds, with one factorised Hessian ({size} × {size}) per fold: it is small enough "
            "to build."
            if self.dense
            else f", which Newton steps with a Hessian of {size} × {size} per fold find that is taken again when it is "
            "out of date."
            if self.stale
            else f" that Newton's method finds, with conjugate gradients: Hessians of {size} × {size} would cost more "
            "than products with X."
        )

    def method(self, tol: float) -> Method:
        if self.kernel or self.span:
            return KernelEquations() if self.kernel else RowSpan(tol)
        return StaleNewton(tol) if self.stale else NewtonLinear(tol, dense=self.dense)

    def task(self, folds: Folds, held: float = 0.0) -> Task:
        train, val = (torch.from_numpy(part) for part in (folds.train_weights(), folds.val_weights()))
        if self.mean:
            train = train / train.sum(1, keepdim=True)
        return Task((self.X, self.y, train), (self.X, self.y, val, torch.tensor(held, dtype=val.dtype)))

    def rows_of_folds(self, index: Tensor, folds: Folds) -> tuple[Tensor, Tensor]:
        rows = self.dense_rows(index)
        if self.intercept:
            rows = torch.cat([rows, rows.new_ones(*rows.shape[:-1], 1)], -1)
        return rows, self.y.new_zeros(folds.count, len(self.y))

    def start(self, task: Task) -> Tensor:
        return self.y.new_zeros(len(task.train[2]), len(self.y), self.X.shape[1] + self.intercept)

    def coefficients(self, w: Tensor, folds: Folds) -> tuple[Array, Array]:
        found = w[0].numpy().T
        return (found[:-1], found[-1]) if self.intercept else (found, np.zeros(found.shape[1]))

    def curvature(self, lam: Tensor, task: Task, w: Tensor) -> Curvature:
        rows = PenalisedRows(self.model, task.train, lam)
        if self.kernel:
            return self._kernel_curvature(rows), None
        if self.span:
            return None, None
        if len(w) * len(self.weight) * w[0].numel() * max(w[0].numel(), 100) > CERTIFIED:
            return None, None
        return extremes(rows.hessians(rows.scores(w)))

    def _kernel_curvature(self, rows: PenalisedRows) -> float:
        """The smallest penalty, where there are more features than rows; an intercept couples with the means of x.

        With the means eliminated, the Hessian is blockdiag(A, Σ s) between two triangular matrices, whose smallest
        singular value is known.
        """
        smallest = float(rows.alpha[: self.X.shape[1]].min())
        if not self.intercept:
            return smallest
        total = rows.weight.sum(1)
        length = feature_sums((rows.weight / total[:, None])[:, None], rows.X).norm(dim=(1, 2))
        factor = 1 + length**2 / 2 - length * (1 + length**2 / 4).sqrt()
        return float((total.clamp(max=smallest) * factor).min())
