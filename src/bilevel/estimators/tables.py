"""A table and its folds as a bilevel problem, which the estimators pass to `hypergradient` and `solve`.

All folds are one task. w has the shape folds × outputs × features, so that computations that the folds share are done
once. λ holds one log penalty per group of features, or a single one for all.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from bilevel.dynamics import DynamicsLike
from bilevel.dynamics.gradient_descent import GradientDescent
from bilevel.engine.method import Method
from bilevel.estimators.folds import Array, Folds
from bilevel.estimators.hyperparameters import Grouping
from bilevel.estimators.optimism import HeldOutRows
from bilevel.methods.linear_models import Minimum
from bilevel.problem import Problem, Task
from bilevel.structures.losses import RowLoss, SquaredError
from bilevel.structures.penalties import GroupPenalties

# Up to this number of features, matrices of features × features are built.
MAX_DENSE_FEATURES = 3000
# The choice of the tether uses at most this number of held-out rows.
MAX_TETHER_ROWS = 2000
# A certificate computes eigenvalues of Hessians if that takes fewer floating-point operations than this.
CERTIFICATE_OPERATIONS = 2e9

# For every fold: its held-out rows, and their scores by its model, of shape rows × outputs.
HeldOutScores: TypeAlias = list[tuple[Array, Array]]
# A lower and an upper bound on the curvature; None if unknown.
Curvature: TypeAlias = tuple[float | None, float | None]


class FoldedTable(ABC):
    """f(λ) = Σ_k E_k(w^k_λ) + c·tether(λ): fold k trains on its rows and is evaluated on its held-out rows.

    Attributes:
        problem: the inner and outer objectives, the same for all folds of this table.
        reason: a sentence that says how hypergradients are computed, and why in this way for this size.
        penalties: the penalty of every feature as a function of λ.
        loss: the loss of a row as a function of its scores.
        factorises: whether the Hessians of the folds are small enough to be factorised.
        stopping_rise: the search for one shared penalty goes from large to small penalties. It stops when f exceeds its
            least value by this factor.
        min_standard_errors: different penalties must be better than a shared one by this number of standard errors.
    """

    problem: Problem
    reason: str
    loss: RowLoss = SquaredError()
    factorises: bool = True
    stopping_rise: float = math.inf
    min_standard_errors: float = 0.5

    def __init__(self, X: Any, y: Array, folds: Folds, groups: Grouping, intercept: bool) -> None:
        self.X = X.tocsr() if sparse.issparse(X) else torch.from_numpy(X)
        self.y, self.weight = torch.from_numpy(np.ascontiguousarray(y.T)), torch.from_numpy(folds.weight)
        self.intercept, features = intercept, X.shape[1]
        per_feature = np.array_equal(groups.of, np.arange(features))
        self.penalties = GroupPenalties(features, None if per_feature else torch.from_numpy(groups.of))

    @abstractmethod
    def task(self, folds: Folds) -> Task:
        """The data of these folds. The last entry of its `val` is the c of the tether, 0."""

    @abstractmethod
    def start(self, task: Task) -> Tensor:
        """w = 0, for as many folds as the task has."""

    @abstractmethod
    def method(self, tol: float) -> Method:
        """The method for the hypergradients. `tol` is its relative error if it is iterative."""

    def shared_values(self, levels: Tensor, task: Task) -> list[float] | None:
        """f at many shared log penalties, computed together. None if computing them one by one takes no longer."""
        return None

    def dynamics(self, task: Task) -> DynamicsLike:
        """The dynamics that converges to the inner solution. None of its steps is run."""
        return GradientDescent(1.0)

    @abstractmethod
    def coefficients(self, w: Tensor, folds: Folds) -> tuple[Array, Array]:
        """Coefficients (features × outputs) and intercepts from the w of one fold."""

    def held_out_scores(self, w: Tensor, folds: Folds, lam: Tensor) -> HeldOutScores:
        """The scores of the held-out rows of every fold, by the model of that fold."""
        results, weights = [], folds.val_weights()
        for k in range(folds.count):
            rows = np.flatnonzero(weights[k])
            coef, intercept = self.coefficients(w[k : k + 1], replace(folds, train=folds.train[k : k + 1]))
            table = self.X[torch.from_numpy(rows)].numpy() if isinstance(self.X, Tensor) else self.X[rows]
            results.append((rows, table @ coef + intercept))
        return results

    def score_slopes(self, minimum: Minimum, rows: Tensor, lam: Tensor) -> Tensor:
        """∂(x w_k)/∂λ, folds × rows × outputs × size of λ, for rows x of shape folds × rows × features of w."""
        solved, inner = minimum.solved_rows(rows), self.problem.inner
        parts = [(inner.penalty, minimum.w), *minimum.others]  # type: ignore[attr-defined]
        slopes = [self._pull_back(function, lam, solved, factor) for function, factor in parts]
        return torch.stack(slopes).sum(0)

    def _pull_back(self, function: Any, lam: Tensor, solved: Tensor, factor: Tensor) -> Tensor:
        factor = factor[:, None, :, None] if solved.shape[3] == 1 else factor[:, None, None]
        slope = -(solved * factor).sum(3)[..., : self.X.shape[1]]
        pulled: Tensor = function.linearised(lam)[1](slope)
        return pulled

    def held_out(self, minimum: Minimum, folds: Folds, lam: Tensor) -> HeldOutRows:
        """At most `MAX_TETHER_ROWS` held-out rows, with their scores and the derivatives of the scores."""
        weights = folds.val_weights()
        order = np.argsort(self.y[0].numpy(), kind="stable")
        chosen = [order[weights[k, order] > 0] for k in range(folds.count)]
        stride = -(-sum(len(rows) for rows in chosen) // MAX_TETHER_ROWS)
        chosen = [rows[::stride] for rows in chosen]
        # All folds are padded to the same number of rows, with rows of weight zero.
        size = max(len(rows) for rows in chosen)
        index = np.stack([np.pad(rows, (0, size - len(rows)), mode="edge") for rows in chosen])
        is_row = np.arange(size) < np.array([len(rows) for rows in chosen])[:, None]
        weight = stride * np.take_along_axis(weights, index, 1) * is_row
        rows, offset = self.rows_of_folds(torch.from_numpy(index), folds)
        slopes = self.score_slopes(minimum, rows, lam)
        scores = (rows @ minimum.w.mT + offset[:, None]).flatten(0, 1)
        kept = torch.from_numpy(is_row.reshape(-1))
        y = self.y[:, torch.from_numpy(index.reshape(-1))].mT
        return HeldOutRows(
            scores[kept], slopes.flatten(0, 1)[kept], y[kept], torch.from_numpy(weight.reshape(-1))[kept]
        )

    @abstractmethod
    def rows_of_folds(self, index: Tensor, folds: Folds) -> tuple[Tensor, Tensor]:
        """The rows that each fold's w is multiplied with, folds × rows × features of w, and offsets of their scores."""

    def dense_rows(self, index: Tensor) -> Tensor:
        """The rows of X at an index array of any shape, as a dense tensor."""
        flat = index.reshape(-1)
        rows = self.X[flat] if isinstance(self.X, Tensor) else torch.from_numpy(self.X[flat.numpy()].toarray())
        return rows.reshape(*index.shape, -1)

    @abstractmethod
    def curvature(self, lam: Tensor, task: Task, w: Tensor) -> Curvature:
        """Bounds on the curvature of the inner objective at w. A bound is None if it would take too long."""


def extremes(matrices: Tensor) -> Curvature:
    """The smallest eigenvalue of several symmetric matrices (None unless positive), and the largest."""
    values = torch.linalg.eigvalsh(matrices)
    smallest = float(values[:, 0].min())
    return (smallest if smallest > 0 else None), float(values[:, -1].max())
