"""Tables whose squared errors are computed from sums over rows, for ridge regression and the elastic net."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bilevel.dynamics import DynamicsLike
from bilevel.dynamics.fista import FISTA
from bilevel.dynamics.penalties import L1
from bilevel.engine.method import Method
from bilevel.estimators.folds import Array, Folds
from bilevel.estimators.hyperparameters import Grouping, PartOfMixture, Tether
from bilevel.estimators.tables import MAX_DENSE_FEATURES, Curvature, FoldedTable, extremes
from bilevel.methods.linear_models.active_set import ActiveSet
from bilevel.methods.linear_models.normal_equations import NormalEquations
from bilevel.problem import Problem, Task
from bilevel.structures.least_squares import LeastSquares
from bilevel.structures.outer_objectives import HeldOutSquares
from bilevel.structures.penalties import FunctionOfLam
from bilevel.structures.rows import GramOfRows, feature_sums, row_scores, weighted_gram

# In an elastic net, penalties per feature must be better than a shared one by this number of standard errors. Another
# random assignment of rows to folds changes the difference by about one standard error.
FEATURE_STANDARD_ERRORS = 1.5
# An elastic net is slow at small penalties. In the search from large penalties to small ones, f is assumed not to fall
# again once it has risen by this factor.
STOPPING_RISE = 1.2


class SumsOfTable(FoldedTable):
    """Squared errors from sums over rows. The rows are read once, not in every evaluation.

    Args:
        l1_ratio: ρ of an elastic net, whose objective is divided by the weight of the rows; None for a ridge. With
            "tuned", λ has two entries: the logarithm of a shared penalty, and that of ρ/(1 − ρ).
        positive: whether to constrain the coefficients of an elastic net to be ≥ 0.
    """

    def __init__(
        self,
        X: Any,
        y: Array,
        folds: Folds,
        groups: Grouping,
        intercept: bool,
        l1_ratio: float | str | None = None,
        positive: bool = False,
    ) -> None:
        super().__init__(X, y, folds, groups, intercept)
        self.l1_ratio, size = l1_ratio, X.shape[1]
        self.wide = size > MAX_DENSE_FEATURES
        self.factorises = not self.wide
        self.positive = positive
        if l1_ratio is not None:
            self.stopping_rise = STOPPING_RISE
        if l1_ratio is not None and self.penalties.groups is None:
            self.min_standard_errors = FEATURE_STANDARD_ERRORS
        self.strengths: FunctionOfLam
        self.squares: FunctionOfLam
        if isinstance(l1_ratio, str):
            self.strengths, self.squares = PartOfMixture(size, True), PartOfMixture(size, False)
        else:
            self.strengths = replace(self.penalties, scale=l1_ratio or 0.0)
            self.squares = replace(self.penalties, scale=1.0 if l1_ratio is None else 1 - l1_ratio)
        self.problem = Problem(
            LeastSquares(self.squares),
            self._outer_of_rows if self.wide else HeldOutSquares(Tether()),
            init=lambda lam: lam.new_zeros(1, len(self.y), size),
            check_derivatives=False,
        )
        if l1_ratio is None:
            self.reason = (
                f"Implicit differentiation of the normal equations ({size} × {size}, one Cholesky factor per fold): "
                "rows outnumber features, and the cost of a hypergradient does not depend on the number of rows."
            )
        else:
            self.reason = (
                "Implicit differentiation on the non-zero coefficients, which proximal steps find: the others do not "
                "change with the penalties."
            )
        rows = [np.flatnonzero(folds.cell == cell) for cell in range(folds.train.shape[1])]
        cells = [self._sums(members, keep_gram=not self.wide) for members in rows]
        self.cells = [torch.stack(parts) for parts in zip(*cells, strict=True)]

    def method(self, tol: float) -> Method:
        return NormalEquations() if self.l1_ratio is None else ActiveSet(self.strengths)

    def _outer_of_rows(self, w: Tensor, lam: Tensor, batch: tuple[Any, ...]) -> Tensor:
        X, y, share, x_mean, y_mean, tether_weight = batch
        error = row_scores(w, X) - w @ x_mean[:, :, None] + y_mean[:, :, None] - y
        return 0.5 * (share[:, None] * error.square()).sum() + Tether()(lam, tether_weight)

    def dynamics(self, task: Task) -> DynamicsLike:
        if self.l1_ratio is None:
            return super().dynamics(task)
        # A tensor, because the checks of a problem are repeated if a number in the closure of the dynamics changes.
        largest = torch.tensor(_largest_curvature(task.train[0]), dtype=torch.float64)

        def proximal(lam: Tensor) -> FISTA:
            lr = 1 / (float(largest) + float(self.squares(lam).detach().max()))
            return FISTA(lr, L1(self.strengths(lam), self.positive))

        return proximal

    def _sums(self, rows: Array, keep_gram: bool) -> tuple[Tensor, ...]:
        """XᵀSX, yᵀSX, yᵀSy, the sums of x and y, and the total weight, over these rows."""
        X, y, s = self.X[rows], self.y[:, rows], self.weight[rows]
        gram = weighted_gram(X, s) if keep_gram else s.new_zeros(())
        total = (s * y.square()).sum()
        return gram, feature_sums(s * y, X), total, feature_sums(s[None], X)[0], y @ s, s.sum()

    def _sum(self, members: Array) -> list[Tensor]:
        """The sums over the cells of each fold."""
        mask = torch.from_numpy(members.astype(float))
        return [torch.tensordot(mask, parts, 1) for parts in self.cells]

    def task(self, folds: Folds) -> Task:
        train, val = self._sum(folds.train), self._sum(folds.val)
        *_, x, y, weight = train
        x_mean, y_mean = x / weight[:, None], y / weight[:, None]
        if not self.intercept:
            x_mean, y_mean = torch.zeros_like(x_mean), torch.zeros_like(y_mean)
        tether, total = weight.new_zeros(()), folds.total
        unit = weight if self.l1_ratio is not None else torch.ones_like(weight)
        gram, moments, _ = _centred(train, x_mean, y_mean)
        moments = moments / unit[:, None, None]
        if not self.wide:
            xx, xy, yy = (part / total for part in _centred(val, x_mean, y_mean))
            return Task((gram / unit[:, None, None], moments), (xx, xy, yy.sum(), tether))
        train_rows, val_rows = (torch.from_numpy(part) for part in (folds.train_weights(), folds.val_weights()))
        rows = GramOfRows(self.X, train_rows / unit[:, None], x_mean * (weight / unit).sqrt()[:, None])
        return Task((rows, moments), (self.X, self.y, val_rows / total, x_mean, y_mean, tether))

    def rows_of_folds(self, index: Tensor, folds: Folds) -> tuple[Tensor, Tensor]:
        *_, x, y, weight = self._sum(folds.train)
        rows = self.dense_rows(index)
        if not self.intercept:
            return rows, torch.zeros_like(y)
        return rows - (x / weight[:, None])[:, None], y / weight[:, None]

    def start(self, task: Task) -> Tensor:
        return torch.zeros_like(task.train[1])

    def coefficients(self, w: Tensor, folds: Folds) -> tuple[Array, Array]:
        *_, x, y, weight = self._sum(folds.train)
        coef = w[0].numpy().T
        intercept = (y[0] - x[0] @ w[0].mT).numpy() / float(weight[0])
        return coef, intercept if self.intercept else 0 * intercept

    def curvature(self, lam: Tensor, task: Task, w: Tensor) -> Curvature:
        if self.l1_ratio is not None:
            return None, None
        return extremes(task.train[0] + torch.diag(self.penalties(lam)))


def _centred(sums: list[Tensor], x_mean: Tensor, y_mean: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """XᵀSX, yᵀSX and yᵀSy of every fold, with the means subtracted from the rows."""
    xx, xy, yy, x, y, weight = sums
    if xx.ndim == 3:
        cross = x[:, :, None] * x_mean[:, None]
        xx = xx - cross - cross.mT + weight[:, None, None] * (x_mean[:, :, None] * x_mean[:, None])
    moments = xy - y_mean[:, :, None] * x[:, None] + (weight[:, None] * y_mean - y)[:, :, None] * x_mean[:, None]
    return xx, moments, yy - 2 * (y * y_mean).sum(1) + weight * y_mean.square().sum(1)


def _largest_curvature(gram: Any) -> float:
    """An upper bound on the eigenvalues of the folds' Gram matrices: the largest trace."""
    diagonal = gram.diagonal(dim1=1, dim2=2) if isinstance(gram, Tensor) else gram.diagonal()
    return max(float(diagonal.sum(-1).max()), 1e-300)
