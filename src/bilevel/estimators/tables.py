"""A table and its folds as a bilevel problem: what the estimators hand to `hypergradient` and `solve`.

All folds are one task. w has the shape folds × outputs × features, so that work which the folds share is done once. λ
holds one log penalty for every group of features, or a single one for all.
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
from bilevel.methods.linear_models._at_minimiser import Minimum
from bilevel.problem import Problem, Task
from bilevel.structures.losses import RowLoss, SquaredError
from bilevel.structures.penalties import GroupPenalties

# Up to so many features, matrices of features × features are built.
LARGEST = 3000
# The most rows that decide how freely penalties may differ.
MOST = 2000
# Floating-point operations that a certificate may spend on the smallest curvature of a Hessian.
CERTIFIED = 2e9

# For every fold, rows that it holds out and their scores by its model, rows × outputs.
HeldOutScores: TypeAlias = list[tuple[Array, Array]]
# A lower and an upper bound.
Curvature: TypeAlias = tuple[float | None, float | None]


class FoldedTable(ABC):
    """f(λ) = Σ_k E_k(w^k_λ) + c·tether(λ): fold k trains on its rows and is judged on those it holds out.

    Attributes:
        problem: the inner and outer objectives, the same for all folds of this table.
        reason: a sentence that says how hypergradients are computed, and why so for this size.
        penalties: the penalty of every feature as a function of λ.
        loss: of the scores of a row.
        factorises: matrices of the folds are small enough to be factorised.
        rise: the search for one penalty goes down from large ones until f is larger than the least by this factor.
        doubt: by how many standard errors penalties that differ must be better than one penalty for all.
    """

    problem: Problem
    reason: str
    loss: RowLoss = SquaredError()
    factorises: bool = True
    rise: float = math.inf
    doubt: float = 0.5

    def __init__(self, X: Any, y: Array, folds: Folds, groups: Grouping, intercept: bool) -> None:
        self.X = X.tocsr() if sparse.issparse(X) else torch.from_numpy(X)
        self.y, self.weight = torch.from_numpy(np.ascontiguousarray(y.T)), torch.from_numpy(folds.weight)
        self.penalties, self.intercept = group_penalties(groups, X.shape[1]), intercept

    @abstractmethod
    def task(self, folds: Folds, held: float = 0.0) -> Task:
        """The data of some folds; `held` is c, the weight of the tether."""

    @abstractmethod
    def start(self, task: Task) -> Tensor:
        """w = 0, for as many folds as the task has."""

    @abstractmethod
    def method(self, tol: float) -> Method:
        """How hypergradients are computed, to a relative error where the method is iterative."""

    def shared_values(self, levels: Tensor, task: Task) -> list[float] | None:
        """f for one penalty in all features, at many log penalties at once; None where that saves nothing."""
        return None

    def dynamics(self, task: Task) -> DynamicsLike:
        """What the inner problem is the limit of; no step of it is run."""
        return GradientDescent(1.0)

    @abstractmethod
    def coefficients(self, w: Tensor, folds: Folds) -> tuple[Array, Array]:
        """Coefficients (features, outputs) and intercepts from the w of a single fold."""

    def held_out_scores(self, w: Tensor, folds: Folds, lam: Tensor) -> HeldOutScores:
        found, weights = [], folds.val_weights()
        for k in range(folds.count):
            rows = np.flatnonzero(weights[k])
            coef, intercept = self.coefficients(w[k : k + 1], replace(folds, train=folds.train[k : k + 1]))
            table = self.X[torch.from_numpy(rows)].numpy() if isinstance(self.X, Tensor) else self.X[rows]
            found.append((rows, table @ coef + intercept))
        return found

    def score_slopes(self, minimum: Minimum, rows: Tensor, lam: Tensor) -> Tensor:
        """∂(x w_k)/∂λ for rows x of every fold, folds × rows × features of w: folds × rows × outputs × size of λ."""
        solved, inner = minimum.solved_rows(rows), self.problem.inner
        parts = [(inner.penalty, minimum.w), *minimum.others]  # type: ignore[attr-defined]
        found = [self._pulled(function, lam, solved, bend) for function, bend in parts]
        return torch.stack(found).sum(0)

    def _pulled(self, function: Any, lam: Tensor, solved: Tensor, bend: Tensor) -> Tensor:
        own = bend[:, None, :, None] if solved.shape[3] == 1 else bend[:, None, None]
        slope = -(solved * own).sum(3)[..., : self.X.shape[1]]
        pulled: Tensor = function.linearised(lam)[1](slope)
        return pulled

    def held_out(self, minimum: Minimum, folds: Folds, lam: Tensor) -> HeldOutRows:
        """The rows that are held out, with their scores and how these depend on λ; at most `MOST` of them."""
        weights = folds.val_weights()
        order = np.argsort(self.y[0].numpy(), kind="stable")
        chosen = [order[weights[k, order] > 0] for k in range(folds.count)]
        every = -(-sum(len(rows) for rows in chosen) // MOST)
        chosen = [rows[::every] for rows in chosen]
        # Folds are filled up with their last row, of weight zero, to equal numbers.
        size = max(len(rows) for rows in chosen)
        index = np.stack([np.pad(rows, (0, size - len(rows)), mode="edge") for rows in chosen])
        filled = np.arange(size) < np.array([len(rows) for rows in chosen])[:, None]
        weight = every * np.take_along_axis(weights, index, 1) * filled
        rows, offset = self.rows_of_folds(torch.from_numpy(index), folds)
        slopes = self.score_slopes(minimum, rows, lam)
        scores = (rows @ minimum.w.mT + offset[:, None]).flatten(0, 1)
        kept = torch.from_numpy(filled.reshape(-1))
        y = self.y[:, torch.from_numpy(index.reshape(-1))].mT
        return HeldOutRows(
            scores[kept], slopes.flatten(0, 1)[kept], y[kept], torch.from_numpy(weight.reshape(-1))[kept]
        )

    @abstractmethod
    def rows_of_folds(self, index: Tensor, folds: Folds) -> tuple[Tensor, Tensor]:
        """Rows as every fold's w sees them, folds × rows × features of w, and what is added to their scores."""

    def dense_rows(self, index: Tensor) -> Tensor:
        """Rows of X for an index of any shape."""
        flat = index.reshape(-1)
        rows = self.X[flat] if isinstance(self.X, Tensor) else torch.from_numpy(self.X[flat.numpy()].toarray())
        return rows.reshape(*index.shape, -1)

    @abstractmethod
    def curvature(self, lam: Tensor, task: Task, w: Tensor) -> Curvature:
        """Bounds on the curvature of the inner objective at w, each None where it would cost too much."""


def group_penalties(groups: Grouping, features: int) -> GroupPenalties:
    each = groups.count == features and np.array_equal(groups.of, np.arange(features))
    return GroupPenalties(features, None if each else torch.from_numpy(groups.of))


def extremes(matrices: Tensor) -> Curvature:
    """The smallest eigenvalue of several symmetric matrices, if it is positive, and the largest."""
    values = torch.linalg.eigvalsh(matrices)
    smallest = float(values[:, 0].min())
    return (smallest if smallest > 0 else None), float(values[:, -1].max())
