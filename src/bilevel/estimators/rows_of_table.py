"""Tables whose criterion is computed row by row, for any loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from bilevel.engine.method import Method
from bilevel.estimators.folds import Array, Folds
from bilevel.estimators.hyperparameters import Grouping, Tether
from bilevel.estimators.tables import CERTIFICATE_OPERATIONS, MAX_DENSE_FEATURES, Curvature, FoldedTable, extremes
from bilevel.methods.linear_models.kernel_equations import KernelEquations
from bilevel.methods.linear_models.newton_linear import NewtonLinear, PenalisedRows, hessians_are_small
from bilevel.methods.linear_models.row_span import RowSpan
from bilevel.methods.linear_models.stale_newton import StaleNewton
from bilevel.problem import Problem, Task
from bilevel.structures.linear_models import LinearModels
from bilevel.structures.losses import RowLoss, SquaredError
from bilevel.structures.outer_objectives import HeldOutLoss
from bilevel.structures.rows import feature_sums

# With more features than rows, models are fitted in the span of the rows, up to this number of rows.
MAX_SPAN_ROWS = 1000


class RowsOfTable(FoldedTable):
    """The sum of losses over rows, with the intercept as an entry of w, for wide tables and losses without closed form.

    Args:
        mean: whether the inner objective is the mean of the losses, not their sum.
    """

    def __init__(
        self, X: Any, y: Array, folds: Folds, groups: Grouping, intercept: bool, loss: RowLoss, mean: bool = False
    ) -> None:
        super().__init__(X, y, folds, groups, intercept)
        self.mean = mean
        self.loss, self.model = loss, LinearModels(loss, self.penalties, intercept)
        (rows, features), outputs = X.shape, len(self.y)
        shape = torch.Size((folds.count, outputs, features + intercept))
        self.problem = Problem(
            self.model,
            HeldOutLoss(self.model, Tether()),
            init=lambda lam: lam.new_zeros(1, *shape[1:]),
            check_derivatives=False,
        )
        size, newton = shape[1] * shape[2], "at the minimiser that Newton's method finds"
        self.make_method: Callable[[float], Method]
        if isinstance(loss, SquaredError) and rows <= MAX_DENSE_FEATURES:
            self.make_method = lambda tol: KernelEquations()
            how = f"of the kernel equations (up to {rows} × {rows}, one Cholesky factor per fold): features "
            how += f"({features}) outnumber rows."
        elif rows < features and rows <= MAX_SPAN_ROWS:
            self.make_method = RowSpan
            how = f"{newton} in the span of the {rows} rows: features ({features}) outnumber them."
        elif hessians_are_small(rows, shape):
            self.make_method = partial(NewtonLinear, dense=True)
            how = f"{newton}, with one factorised Hessian ({size} × {size}) per fold: it is small enough to build."
        elif not sparse.issparse(X) and size <= min(20 * rows**0.5, MAX_DENSE_FEATURES):
            # Factorising Hessians takes less time than the products with X that this saves.
            self.make_method = StaleNewton
            how = f"{newton}, with a Hessian of {size} × {size} per fold that is updated only when needed."
        else:
            self.make_method, self.factorises = partial(NewtonLinear, dense=False), False
            how = f"{newton}, with conjugate gradients: Hessians of {size} × {size} would cost more than products "
            how += "with X."
        self.reason = f"Implicit differentiation {how}"

    def method(self, tol: float) -> Method:
        return self.make_method(tol)

    def task(self, folds: Folds) -> Task:
        train, val = (torch.from_numpy(part) for part in (folds.train_weights(), folds.val_weights()))
        if self.mean:
            train = train / train.sum(1, keepdim=True)
        return Task((self.X, self.y, train), (self.X, self.y, val, val.new_zeros(())))

    def rows_of_folds(self, index: Tensor, folds: Folds) -> tuple[Tensor, Tensor]:
        rows = self.dense_rows(index)
        if self.intercept:
            rows = torch.cat([rows, rows.new_ones(*rows.shape[:-1], 1)], -1)
        return rows, self.y.new_zeros(folds.count, len(self.y))

    def start(self, task: Task) -> Tensor:
        return self.y.new_zeros(len(task.train[2]), len(self.y), self.X.shape[1] + self.intercept)

    def coefficients(self, w: Tensor, folds: Folds) -> tuple[Array, Array]:
        coef = w[0].numpy().T
        return (coef[:-1], coef[-1]) if self.intercept else (coef, np.zeros(coef.shape[1]))

    def curvature(self, lam: Tensor, task: Task, w: Tensor) -> Curvature:
        rows = PenalisedRows(self.model, task.train, lam)
        method = self.method(1.0)
        if isinstance(method, KernelEquations):
            return self._kernel_curvature(rows), None
        size = w[0].numel()
        if isinstance(method, RowSpan) or w.numel() * len(self.weight) * max(size, 100) > CERTIFICATE_OPERATIONS:
            return None, None
        return extremes(rows.hessians(rows.scores(w)))

    def _kernel_curvature(self, rows: PenalisedRows) -> float:
        """A lower bound on the curvature if there are more features than rows.

        Without an intercept it is the smallest penalty. An intercept couples with the means of x: the Hessian is
        blockdiag(A, Σ s) between two triangular matrices, whose smallest singular value has a closed form.
        """
        smallest = float(rows.alpha[: self.X.shape[1]].min())
        if not self.intercept:
            return smallest
        total = rows.weight.sum(1)
        length = feature_sums((rows.weight / total[:, None])[:, None], rows.X).norm(dim=(1, 2))
        factor = 1 + length**2 / 2 - length * (1 + length**2 / 4).sqrt()
        return float((total.clamp(max=smallest) * factor).min())
