"""The criterion of a linear model with a smooth loss, by Newton's method on all folds at once.

Fold k minimises Σ_i s_ki loss(x_i w, y_i) + ½ Σ_j α_j ‖w_j‖², and is judged by the loss on the rows held out. With H_k
the Hessian at the minimiser and q_k = H_k⁻¹∇E_k, implicit differentiation of ∇L = 0 gives
∂f/∂log α_j = −α_j Σ_k ⟨q_kj, w_kj⟩. Systems with H_k are solved by Cholesky factors where it is small enough to be
built, and by conjugate gradients, with products with X only, where not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from scipy import linalg, sparse
from typing_extensions import Self

from bilevel.estimators.criterion import Criterion, Evaluation
from bilevel.estimators.folds import Array, Folds
from bilevel.estimators.linear_problem import LinearProblem
from bilevel.problem import Problem, Task

NEWTON_STEPS = 50
# Floating-point operations for one round of Hessians up to which they are built.
LARGEST = 2e7

# Solves H_k x_k = b_k for all folds, to a relative accuracy.
Solve: TypeAlias = Callable[[Array, float], Array]


class NewtonCriterion(Criterion):
    """w has the shape (K, features, outputs), the intercept a feature of its own."""

    def __init__(self, linear: LinearProblem) -> None:
        self.linear, self.folds, self.loss = linear, linear.folds, linear.loss
        self.X, self.y = linear.X, linear.y[:, None, :]
        self.train, self.val = self.folds.train_weights().T, self.folds.val_weights().T
        self.w = np.zeros(linear.shape)
        # Where CG for q begins: the last one, for a neighbouring λ.
        self.q = np.zeros(linear.shape)
        rows, features = self.X.shape
        size = features * linear.y.shape[1]
        self.dense = self.folds.count * rows * size**2 <= LARGEST and self.folds.count * size**2 <= 2e8
        if not self.dense:
            self.diagonal = self._largest_diagonal()
        self.method = "Implicit differentiation at the minimiser that Newton's method finds, " + (
            f"with one factorised Hessian ({size} × {size}) per fold: it is small enough to build."
            if self.dense
            else f"with conjugate gradients: Hessians of {size} × {size} would cost more than products with X."
        )

    def restricted(self, folds: Folds) -> Self:
        return type(self)(replace(self.linear, folds=folds))

    def evaluate(self, log_alpha: Array) -> Evaluation:
        alpha = self._alpha(log_alpha)
        self.w, scores, solve = self._minimise(self.w, alpha)
        share = self.val / self.folds.total
        value = float((share * self.loss.values(scores, self.y)).sum())
        slope = self._transposed(share[:, :, None] * self.loss.slopes(scores, self.y))
        self.q = solve(slope, 1e-8)
        return Evaluation(value, -(alpha[:, None] * self.q * self.w).sum((0, 2))[: len(log_alpha)])

    def refit(self, log_alpha: Array) -> tuple[Array, Array]:
        everything = np.ones((1, self.folds.train.shape[1]), dtype=bool)
        all_rows = self.restricted(replace(self.folds, train=everything, val=everything))
        w = all_rows._minimise(self.w.mean(0, keepdims=True), self._alpha(log_alpha))[0][0]
        return w[: len(log_alpha)], w[len(log_alpha) :].sum(0)

    def bilevel_problem(self, log_alpha: Array) -> tuple[Problem, Any, Task, Any, dict[str, Any]]:
        self.evaluate(log_alpha)
        told: dict[str, Any] = {"products": 30}
        if self.dense:
            hessians = self._hessians(self.loss.curvatures(self._scores(self.w)), self._alpha(log_alpha))
            smallest = min(float(linalg.eigvalsh(matrix, subset_by_index=(0, 0))[0]) for matrix in hessians)
            told |= {"mu": smallest} if smallest > 0 else {}
        problem, task = self.linear.for_engine()
        return problem, torch.from_numpy(log_alpha), task, torch.from_numpy(self.w), told

    def _minimise(self, w: Array, alpha: Array) -> tuple[Array, Array, Solve]:
        """The folds' minimisers from w, the scores there, and the solver of their Hessians."""
        scores = self._scores(w)
        value = self._values(w, scores, alpha)
        done = np.zeros(len(w), dtype=bool)
        for _ in range(NEWTON_STEPS):
            slope = self._transposed(self.train[:, :, None] * self.loss.slopes(scores, self.y)) + alpha[:, None] * w
            slope[:, -1] += self.linear.gauge * w[:, -1].sum(-1, keepdims=True)
            step = self._solver(scores, alpha)(slope, 1e-4)
            promised, moved = (slope * step).sum((1, 2)), self._scores(step)
            # Convergence is quadratic by now: the step of such a fold is its last.
            near = promised <= 1e-13 * np.abs(value)
            size = self._sizes(w, scores, value, step, moved, promised, near, alpha)
            size[done] = 0
            w, scores = w - size[:, None, None] * step, scores - size[:, None] * moved
            done |= near | (size == 0)
            if done.all():
                break
            value = self._values(w, scores, alpha)
        return w, scores, self._solver(scores, alpha)

    def _sizes(
        self,
        w: Array,
        scores: Array,
        value: Array,
        step: Array,
        moved: Array,
        promised: Array,
        near: Array,
        alpha: Array,
    ) -> Array:
        """How much of its step each fold takes: halved until its objective falls enough, if it is not next door."""
        size = np.ones(len(w))
        for _ in range(30):
            there = self._values(w - size[:, None, None] * step, scores - size[:, None] * moved, alpha)
            short = ~(there <= value - 1e-4 * size * promised) & ~near
            if not short.any():
                break
            size[short] /= 2
        else:
            size[short] = 0
        return size

    def _values(self, w: Array, scores: Array, alpha: Array) -> Array:
        penalty = (alpha[:, None] * w**2).sum((1, 2)) + self.linear.gauge * w[:, -1].sum(-1) ** 2
        return (self.train * self.loss.values(scores, self.y)).sum(0) + 0.5 * penalty

    def _scores(self, w: Array) -> Array:
        folds, features, outputs = w.shape
        return (self.X @ w.transpose(1, 0, 2).reshape(features, -1)).reshape(-1, folds, outputs)

    def _transposed(self, v: Array) -> Array:
        """Xᵀv for every fold."""
        return (self.X.T @ v.reshape(len(v), -1)).reshape(-1, *v.shape[1:]).transpose(1, 0, 2)

    def _alpha(self, log_alpha: Array) -> Array:
        return np.append(np.exp(log_alpha), 0.0) if self.linear.free else np.exp(log_alpha)

    def _solver(self, scores: Array, alpha: Array) -> Solve:
        curvatures = self.loss.curvatures(scores)
        return self._cholesky(curvatures, alpha) if self.dense else self._conjugate_gradients(curvatures, alpha)

    def _cholesky(self, curvatures: Array, alpha: Array) -> Solve:
        factors = []
        for matrix in self._hessians(curvatures, alpha):
            # Rows that are classified with certainty have no curvature; rounding must not make it negative. What is
            # added is small for each coefficient, whatever the units of the others.
            diagonal = matrix.diagonal()
            matrix.flat[:: len(matrix) + 1] += 1e-14 * np.where(diagonal > 0, diagonal, diagonal.max())
            factors.append(linalg.cho_factor(matrix, lower=True, overwrite_a=True, check_finite=False))

        def solve(right: Array, tol: float) -> Array:
            solved = [
                linalg.cho_solve(f, b.reshape(-1), check_finite=False) for f, b in zip(factors, right, strict=True)
            ]
            return np.stack(solved).reshape(right.shape)

        return solve

    def _hessians(self, curvatures: Array, alpha: Array) -> Array:
        """Over coefficients in the order (feature, output)."""
        folds, features, outputs = self.linear.shape
        found = np.empty((folds, features, outputs, features, outputs))
        for a in range(outputs):
            unit = np.zeros((1, 1, outputs))
            unit[..., a] = 1
            column = self.train[:, :, None] * self.loss.bend(curvatures, unit)
            for k in range(folds):
                for b in range(a, outputs):
                    found[k, :, a, :, b] = found[k, :, b, :, a] = _weighted_gram(self.X, column[:, k, b])
        matrices = found.reshape(folds, features * outputs, -1)
        diagonal = np.arange(features * outputs)
        matrices[:, diagonal, diagonal] += np.repeat(alpha, outputs)
        if self.linear.gauge:
            matrices[:, -outputs:, -outputs:] += self.linear.gauge
        return matrices

    def _largest_diagonal(self) -> Array:
        """Of the folds' Hessians, if every row had the largest curvature of the loss."""
        squares = self.X.multiply(self.X) if sparse.issparse(self.X) else self.X**2
        return self.loss.steepest * np.asarray(squares.T @ self.train).T

    def _conjugate_gradients(self, curvatures: Array, alpha: Array) -> Solve:
        """Preconditioned by a diagonal; each fold has its own recurrence, and a product with X serves all of them."""
        size = self.diagonal + alpha + self.linear.gauge

        def times(v: Array) -> Array:
            image = self._transposed(self.train[:, :, None] * self.loss.bend(curvatures, self._scores(v)))
            image += alpha[:, None] * v
            image[:, -1] += self.linear.gauge * v[:, -1].sum(-1, keepdims=True)
            return image

        def solve(right: Array, tol: float) -> Array:
            x = self.q.copy() if self.q.shape == right.shape and tol < 1e-6 else np.zeros_like(right)
            residual = right - times(x) if x.any() else right.copy()
            target = tol * _norms(right)
            direction = preconditioned = residual / size[:, :, None]
            slope = (residual * preconditioned).sum((1, 2))
            for _ in range(1000):
                if (_norms(residual) <= target).all():
                    break
                image = times(direction)
                length = slope / np.maximum((direction * image).sum((1, 2)), 1e-300)
                x = x + length[:, None, None] * direction
                residual = residual - length[:, None, None] * image
                preconditioned = residual / size[:, :, None]
                before, slope = slope, (residual * preconditioned).sum((1, 2))
                direction = preconditioned + (slope / np.maximum(before, 1e-300))[:, None, None] * direction
            return x

        return solve


def _norms(v: Array) -> Array:
    return np.sqrt((v**2).sum((1, 2)))


def _weighted_gram(X: Any, weight: Array) -> Array:
    if sparse.issparse(X):
        return np.asarray((X.T @ X.multiply(weight[:, None])).todense())
    return X.T @ (X * weight[:, None])
