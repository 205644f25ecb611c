"""The criterion of a linear model with a smooth loss, by Newton's method on all folds at once.

Fold k minimises Σ_i s_ki loss(x_i w, y_i) + ½ Σ_j α_j ‖w_j‖², and is judged by the loss on the rows held out. With H_k
the Hessian at the minimiser and q_k = H_k⁻¹∇E_k, implicit differentiation of ∇L = 0 gives
∂f/∂log α_j = −α_j Σ_k ⟨q_kj, w_kj⟩. Systems with H_k are solved by Cholesky factors where it is small enough to be
built, and by conjugate gradients, with products with X only, where not. (`gram_criterion` stands between the two.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from scipy import linalg, sparse
from typing_extensions import Self

from bilevel.estimators.criterion import EXACT, Criterion, Evaluation
from bilevel.estimators.folds import Array, Folds
from bilevel.estimators.linear_problem import LinearProblem
from bilevel.problem import Problem, Task

NEWTON_STEPS = 50
# Floating-point operations for one round of Hessians up to which they are built.
LARGEST = 2e7

# Solves H_k x_k = b_k for all folds, to a relative accuracy, from a start.
Solve: TypeAlias = Callable[[Array, float, Array | None], Array]


class NewtonCriterion(Criterion):
    """w has the shape (K, features, outputs), the intercept a feature of its own."""

    def __init__(self, linear: LinearProblem) -> None:
        self.folds, self.loss = linear.folds, linear.loss
        self.linear = linear = replace(linear, folds=linear.folds.merged())
        self.X, self.y = linear.X, linear.y[:, None, :]
        self.train, self.val = linear.folds.train_weights().T, linear.folds.val_weights().T
        self.w = np.zeros(linear.shape)
        # Where CG for q begins: the last one, for a neighbouring λ.
        self.q = np.zeros(linear.shape)
        self.dense = hessians_are_small(linear)
        size = linear.shape[1] * linear.shape[2]
        self.method = "Implicit differentiation at the minimiser that Newton's method finds, " + (
            f"with one factorised Hessian ({size} × {size}) per fold: it is small enough to build."
            if self.dense
            else f"with conjugate gradients: Hessians of {size} × {size} would cost more than products with X."
        )

    def restricted(self, folds: Folds) -> Self:
        fewer = type(self)(replace(self.linear, folds=folds))
        # Folds of almost the same rows have almost the same minimisers.
        fewer.w[:] = self.w.mean(0)
        return fewer

    def evaluate(self, log_alpha: Array, accuracy: float = EXACT) -> Evaluation:
        alpha = self._alpha(log_alpha)
        self.w, scores, solve = self._minimise(self.w, alpha)
        share = self.val / self.folds.total
        value = float((share * self.loss.values(scores, self.y)).sum())
        slope = self.linear.transposed(share[:, :, None] * self.loss.slopes(scores, self.y))
        self.q = solve(slope, accuracy, self.q)
        return Evaluation(value, -(alpha[:, None] * self.q * self.w).sum((0, 2))[: len(log_alpha)])

    def refit(self, log_alpha: Array) -> tuple[Array, Array]:
        everything = np.ones((1, self.folds.train.shape[1]), dtype=bool)
        all_rows = self.restricted(replace(self.folds, train=everything, val=everything))
        w = all_rows._minimise(all_rows.w, self._alpha(log_alpha))[0][0]
        return w[: len(log_alpha)], w[len(log_alpha) :].sum(0)

    def bilevel_problem(self, log_alpha: Array) -> tuple[Problem, Any, Task, Any, dict[str, Any]]:
        self.evaluate(log_alpha)
        told: dict[str, Any] = {"products": 30}
        if self.dense:
            hessians = self._hessians(self.loss.curvatures(self.linear.scores(self.w)), self._alpha(log_alpha))
            smallest = min(float(linalg.eigvalsh(matrix, subset_by_index=(0, 0))[0]) for matrix in hessians)
            told |= {"mu": smallest} if smallest > 0 else {}
        problem, task = self.linear.for_engine()
        return problem, torch.from_numpy(log_alpha), task, torch.from_numpy(self.w), told

    def _minimise(self, w: Array, alpha: Array) -> tuple[Array, Array, Solve]:
        """The folds' minimisers from w, the scores there, and the solver of their Hessians."""
        scores = self.linear.scores(w)
        value = self._values(w, scores, alpha)
        done = np.zeros(len(w), dtype=bool)
        for _ in range(NEWTON_STEPS):
            slope = self.linear.transposed(self.train[:, :, None] * self.loss.slopes(scores, self.y))
            slope += self._penalty_slope(w, alpha)
            step = self._solver(scores, alpha)(slope, 1e-4, None)
            promised, moved = (slope * step).sum((1, 2)), self.linear.scores(step)
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

    def _penalty_slope(self, w: Array, alpha: Array) -> Array:
        """The derivative of the penalties, and of what keeps intercepts together."""
        slope = alpha[:, None] * w
        slope[:, -1] += self.linear.gauge * w[:, -1].sum(-1, keepdims=True)
        return slope

    def _alpha(self, log_alpha: Array) -> Array:
        return np.append(np.exp(log_alpha), 0.0) if self.linear.free else np.exp(log_alpha)

    def _solver(self, scores: Array, alpha: Array) -> Solve:
        curvatures = self.loss.curvatures(scores)
        return self._cholesky(curvatures, alpha) if self.dense else self._conjugate_gradients(curvatures, alpha)

    def _cholesky(self, curvatures: Array, alpha: Array) -> Solve:
        factors = factorised(self._hessians(curvatures, alpha))
        return lambda right, tol, start: solved(factors, right)

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
                    found[k, :, a, :, b] = found[k, :, b, :, a] = self._weighted_gram(column[:, k, b])
        return self._penalised(found.reshape(folds, features * outputs, -1), alpha)

    def _weighted_gram(self, weight: Array) -> Array:
        """Xᵀ diag(weight) X, an intercept included."""
        X = self.X
        weighted = X.multiply(weight[:, None]) if sparse.issparse(X) else X * weight[:, None]
        gram = np.asarray((X.T @ weighted).todense()) if sparse.issparse(X) else X.T @ weighted
        if not self.linear.free:
            return gram
        sums = np.asarray(weighted.sum(0)).reshape(-1, 1)
        return np.block([[gram, sums], [sums.T, weight.sum()]])

    def _penalised(self, matrices: Array, alpha: Array) -> Array:
        """The matrices with the curvature of the penalties added in place."""
        outputs = self.linear.shape[2]
        diagonal = np.arange(matrices.shape[-1])
        matrices[:, diagonal, diagonal] += np.repeat(alpha, outputs)
        if self.linear.gauge:
            matrices[:, -outputs:, -outputs:] += self.linear.gauge
        return matrices

    @cached_property
    def _diagonal(self) -> Array:
        """Of the folds' Hessians, if every row had the largest curvature of the loss."""
        squares = self.X.multiply(self.X) if sparse.issparse(self.X) else self.X**2
        sums = np.asarray(squares.T @ self.train)
        sums = np.vstack([sums, self.train.sum(0)]) if self.linear.free else sums
        return self.loss.steepest * sums.T

    def _preconditioner(self, alpha: Array) -> Callable[[Array], Array]:
        size = self._diagonal + alpha + self.linear.gauge
        return lambda residual: residual / size[:, :, None]

    def _conjugate_gradients(self, curvatures: Array, alpha: Array) -> Solve:
        """Each fold has its own recurrence, and a product with X serves all of them."""
        precondition = self._preconditioner(alpha)

        def times(v: Array) -> Array:
            bent = self.train[:, :, None] * self.loss.bend(curvatures, self.linear.scores(v))
            return self.linear.transposed(bent) + self._penalty_slope(v, alpha)

        def solve(right: Array, tol: float, start: Array | None) -> Array:
            x = np.zeros_like(right) if start is None else start.copy()
            residual = right - times(x) if x.any() else right.copy()
            target = tol * _norms(right)
            direction = preconditioned = precondition(residual)
            slope = (residual * preconditioned).sum((1, 2))
            for _ in range(1000):
                if (_norms(residual) <= target).all():
                    break
                image = times(direction)
                length = slope / np.maximum((direction * image).sum((1, 2)), 1e-300)
                x = x + length[:, None, None] * direction
                residual = residual - length[:, None, None] * image
                preconditioned = precondition(residual)
                before, slope = slope, (residual * preconditioned).sum((1, 2))
                direction = preconditioned + (slope / np.maximum(before, 1e-300))[:, None, None] * direction
            return x

        return solve


def hessians_are_small(linear: LinearProblem) -> bool:
    """Whether building every fold's Hessian costs less than the products with X that it saves."""
    folds, features, outputs = linear.shape
    size = features * outputs
    return folds * linear.X.shape[0] * size**2 <= LARGEST and folds * size**2 <= 2e8


def factorised(matrices: Array) -> list[Array]:
    """Cholesky factors; the matrices are overwritten."""
    factors = []
    for matrix in matrices:
        # Rows that are classified with certainty have no curvature; rounding must not make it negative. What is
        # added is small for each coefficient, whatever the units of the others.
        diagonal = matrix.diagonal()
        matrix.flat[:: len(matrix) + 1] += 1e-14 * np.where(diagonal > 0, diagonal, diagonal.max())
        factor, failed = linalg.lapack.dpotrf(matrix.T, lower=1, overwrite_a=1, clean=0)
        if failed:
            raise linalg.LinAlgError(f"The Hessian of a fold is not positive definite in its row {failed}.")
        factors.append(factor)
    return factors


def solved(factors: list[Array], *right: Array) -> Array:
    """H_k⁻¹ b_k for every fold, for one or several b; stacked where there are several."""
    columns = np.stack(right, axis=-1).reshape(len(factors), -1, len(right))
    found = [linalg.lapack.dpotrs(factor, b, lower=1)[0] for factor, b in zip(factors, columns, strict=True)]
    together = np.stack(found).transpose(2, 0, 1).reshape(len(right), *right[0].shape)
    return together if len(right) > 1 else together[0]


def _norms(v: Array) -> Array:
    return np.sqrt((v**2).sum((1, 2)))
