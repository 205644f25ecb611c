"""The logistic criterion by Newton's method with factorised Hessians, for problems with few coefficients.

Fold k minimises Σ_i s_i log-loss_i(w) + ½ Σ_j α_j ‖w_j‖², and is judged by the mean log-loss on the rows held out. The
Hessian H_k at the minimiser is factorised too and gives q_k = H_k⁻¹∇E_k, and with it
∂f/∂log α_j = −α_j Σ_k ⟨q_kj, w_kj⟩.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy import linalg, sparse
from scipy.special import expit, log_expit, log_softmax, softmax
from typing_extensions import Self

from bilevel.estimators.criterion import Criterion, Evaluation
from bilevel.estimators.folds import Array, Folds
from bilevel.estimators.linear_problem import LinearProblem
from bilevel.problem import Problem, Task

NEWTON_STEPS = 50


class NewtonCriterion(Criterion):
    """All coefficients of a fold in one Hessian: (features + intercept) × outputs rows."""

    def __init__(self, linear: LinearProblem) -> None:
        self.linear, self.folds = linear, linear.folds
        self.X, self.y = linear.X, linear.y.numpy()
        self.train, self.val = self.folds.train_weights(), self.folds.val_weights()
        size = self.X.shape[1] * linear.outputs
        self.w = np.zeros(linear.shape)
        self.method = (
            f"Implicit differentiation at the minimiser that Newton's method finds: the Hessian ({size} × {size}, one "
            "per fold) is small enough to factorise."
        )

    def restricted(self, folds: Folds) -> Self:
        return type(self)(replace(self.linear, folds=folds))

    def evaluate(self, log_alpha: Array) -> Evaluation:
        alpha, total = self._alpha(log_alpha), self.folds.total
        value, gradient = 0.0, np.zeros_like(log_alpha)
        for k, (s, v) in enumerate(zip(self.train, self.val, strict=True)):
            fold = _Fold(self.X, self.y, s, alpha, self.linear.free)
            self.w[k], solve = fold.minimise(self.w[k])
            judged = np.flatnonzero(v)
            X, y, v = self.X[judged], self.y[judged], v[judged] / total
            scores = X @ self.w[k]
            value += float(v @ _losses(scores, y))
            slope = X.T @ (v[:, None] * (probabilities(scores) - y))
            gradient -= (alpha[:, None] * solve(slope) * self.w[k]).sum(1)[: len(log_alpha)]
        return Evaluation(value, gradient)

    def refit(self, log_alpha: Array) -> tuple[Array, Array]:
        fold = _Fold(self.X, self.y, self.folds.weight, self._alpha(log_alpha), self.linear.free)
        w = fold.minimise(self.w.mean(0))[0]
        features = len(log_alpha)
        return w[:features], w[features:].sum(0)

    def bilevel_problem(self, log_alpha: Array) -> tuple[Problem, Any, Task, Any, dict[str, Any]]:
        self.evaluate(log_alpha)
        alpha = self._alpha(log_alpha)
        smallest = min(
            float(linalg.eigvalsh(_Fold(self.X, self.y, s, alpha, self.linear.free).hessian(w))[0])
            for s, w in zip(self.train, self.w, strict=True)
        )
        told: dict[str, Any] = {"products": 30, **({"mu": smallest} if smallest > 0 else {})}
        return self.linear.problem(), torch.from_numpy(log_alpha), self.linear.task, torch.from_numpy(self.w), told

    def _alpha(self, log_alpha: Array) -> Array:
        return np.concatenate([np.exp(log_alpha), np.zeros(self.linear.free)])


class _Fold:
    """The inner problem of one fold."""

    def __init__(self, X: Any, y: Array, s: Array, alpha: Array, free: int) -> None:
        rows = np.flatnonzero(s)
        self.X, self.y, self.s, self.alpha = X[rows], y[rows], s[rows], alpha
        # The sum of several classes' intercepts, which changes nothing, is kept at zero.
        self.gauge = float(free and y.shape[1] > 1)

    def minimise(self, w: Array) -> tuple[Array, Any]:
        """The minimiser by Newton's method from w, and products with the inverse of the Hessian there."""
        scores = self.X @ w
        value = self._value(w, scores)
        for _ in range(NEWTON_STEPS):
            slope = self._slope(w, scores)
            solve = self._inverse(w, scores)
            step = solve(slope)
            promised = float((slope * step).sum())
            if promised <= 1e-13 * max(abs(value), 1e-300):
                # Convergence is quadratic here: this step is the last.
                w = w - step
                break
            size, moved = 1.0, self.X @ step
            while size > 1e-8:
                there = w - size * step
                reached = self._value(there, scores - size * moved)
                if reached <= value - 1e-4 * size * promised:
                    break
                size /= 2
            else:
                break
            w, scores, value = there, scores - size * moved, reached
        return w, self._inverse(w, self.X @ w)

    def hessian(self, w: Array, scores: Array | None = None) -> Array:
        """Over coefficients in the order (feature, output)."""
        p = probabilities(self.X @ w if scores is None else scores)
        features, outputs = w.shape
        blocks = np.empty((features, outputs, features, outputs))
        for a in range(outputs):
            for b in range(a, outputs):
                weight = self.s * p[:, a] * ((a == b) - p[:, b])
                blocks[:, a, :, b] = blocks[:, b, :, a] = _weighted_gram(self.X, weight)
        matrix = blocks.reshape(features * outputs, -1)
        matrix.flat[:: len(matrix) + 1] += np.repeat(self.alpha, outputs)
        if self.gauge:
            matrix[-outputs:, -outputs:] += self.gauge
        return matrix

    def _inverse(self, w: Array, scores: Array) -> Any:
        matrix = self.hessian(w, scores)
        # Probabilities of 0 and 1 leave no curvature of their own; rounding must not make it negative.
        matrix.flat[:: len(matrix) + 1] += 1e-14 * matrix.diagonal().max()
        factor = linalg.cho_factor(matrix, lower=True, overwrite_a=True, check_finite=False)
        return lambda right: linalg.cho_solve(factor, right.reshape(-1), check_finite=False).reshape(w.shape)

    def _value(self, w: Array, scores: Array) -> float:
        penalty = 0.5 * float((self.alpha[:, None] * w**2).sum() + self.gauge * w[-1].sum() ** 2)
        return float(self.s @ _losses(scores, self.y)) + penalty

    def _slope(self, w: Array, scores: Array) -> Array:
        slope = self.X.T @ (self.s[:, None] * (probabilities(scores) - self.y)) + self.alpha[:, None] * w
        slope[-1] += self.gauge * w[-1].sum()
        return slope


def _weighted_gram(X: Any, weight: Array) -> Array:
    if sparse.issparse(X):
        return np.asarray((X.T @ X.multiply(weight[:, None])).todense())
    return X.T @ (X * weight[:, None])


def _losses(scores: Array, y: Array) -> Array:
    if y.shape[1] > 1:
        return -(y * log_softmax(scores, axis=1)).sum(1)
    return -log_expit((2 * y - 1) * scores)[:, 0]


def probabilities(scores: Array) -> Array:
    """Of every class, or of the second of two."""
    return softmax(scores, axis=1) if scores.shape[1] > 1 else expit(scores)
