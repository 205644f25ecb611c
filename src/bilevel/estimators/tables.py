"""A table and its folds as a bilevel problem: what the estimators hand to `hypergradient` and `solve`.

All folds are one task. w has the shape folds × outputs × features, so that work which the folds share is done once. λ
holds one log penalty for every group of features, or a single one for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from bilevel.dynamics import DynamicsLike
from bilevel.dynamics.gradient_descent import GradientDescent
from bilevel.engine.method import Method
from bilevel.estimators.folds import Array, Folds
from bilevel.estimators.hyperparameters import Grouping
from bilevel.problem import Problem, Task
from bilevel.structures.losses import RowLoss, SquaredError
from bilevel.structures.penalties import GroupPenalties
from bilevel.structures.rows import row_scores

# Up to so many features, matrices of features × features are built.
LARGEST = 3000
# Floating-point operations that a certificate may spend on the smallest curvature of a Hessian.
CERTIFIED = 2e9


class FoldedTable(ABC):
    """f(λ) = Σ_k E_k(w^k_λ) + c·tether(λ): fold k trains on its rows and is judged on those it holds out.

    Attributes:
        problem: the inner and outer objectives, the same for all folds of this table.
        reason: a sentence that says how hypergradients are computed, and why so for this size.
        penalties: the penalty of every feature as a function of λ.
        loss: of the scores of a row.
    """

    problem: Problem
    reason: str
    loss: RowLoss = SquaredError()

    def __init__(self, X: Any, y: Array, folds: Folds, groups: Grouping, intercept: bool) -> None:
        self.X = X.tocsr() if sparse.issparse(X) else torch.from_numpy(X)
        self.y, self.weight = torch.from_numpy(np.ascontiguousarray(y.T)), torch.from_numpy(folds.weight)
        self.penalties, self.intercept = group_penalties(groups, X.shape[1]), intercept

    @cached_property
    def judge(self) -> FoldedTable:
        """The table that fits folds and is judged on what they hold out: this one, unless rows are left out singly."""
        return self

    def criterion(self, folds: Folds) -> Folds:
        """What the penalties are tuned on."""
        return folds

    def nested(self, folds: Folds, k: int) -> Folds:
        """What the penalties are tuned on before fold k judges them: nothing that it is judged on."""
        return folds.without(k)

    @abstractmethod
    def task(self, folds: Folds, held: float = 0.0) -> Task:
        """The data of some folds; `held` is c, the weight of the tether."""

    @abstractmethod
    def start(self, task: Task) -> Tensor:
        """w = 0, for as many folds as the task has."""

    @abstractmethod
    def method(self, tol: float) -> Method:
        """How hypergradients are computed, to a relative error where the method is iterative."""

    def dynamics(self, task: Task) -> DynamicsLike:
        """What the inner problem is the limit of; no step of it is run."""
        return GradientDescent(1.0)

    @abstractmethod
    def coefficients(self, w: Tensor, folds: Folds) -> tuple[Array, Array]:
        """Coefficients (features, outputs) and intercepts from the w of a single fold."""

    def held_out_losses(self, w: Tensor, folds: Folds) -> Array:
        """The weighted loss of every row that a single fold holds out."""
        rows = np.flatnonzero(folds.val_weights()[0])
        coef, intercept = self.coefficients(w, folds)
        scores = row_scores(torch.from_numpy(coef.T.copy()), self.X[rows]) + torch.from_numpy(intercept)[:, None]
        return (self.weight[rows] * self.loss.values(scores, self.y[:, rows])).numpy()

    @abstractmethod
    def curvature(self, lam: Tensor, task: Task, w: Tensor) -> float | None:
        """A lower bound on the smallest curvature of the inner objective at w; None where it would cost too much."""


def group_penalties(groups: Grouping, features: int) -> GroupPenalties:
    each = groups.count == features and np.array_equal(groups.of, np.arange(features))
    return GroupPenalties(features, None if each else torch.from_numpy(groups.of))


def positive(number: float) -> float | None:
    return number if number > 0 else None
