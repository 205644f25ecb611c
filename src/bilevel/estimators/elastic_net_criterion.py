"""The elastic net criterion: proximal steps find which coefficients are not zero, the equations on those do the rest.

Fold k minimises (1/2N) Σ_i s_i (y_i − x_i w)² + Σ_j α_j (ρ |w_j| + ½(1 − ρ) w_j²), N = Σ s_i. Where the sign pattern is
known, its fixed point under the proximal map is a linear system A_SS w_S = c_S − ρ α_S sign(w_S) on the support S, and
differentiating that gives ∂f/∂log α_j = −α_j q_j (ρ sign(w_j) + (1 − ρ) w_j) with A_SS q_S = ∇_S E, and 0 off the
support.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import linalg, sparse
from torch import Tensor
from typing_extensions import Self

from bilevel.dynamics.fista import FISTA
from bilevel.dynamics.penalties import L1
from bilevel.estimators.criterion import EXACT, Criterion, Evaluation
from bilevel.estimators.folds import Array, Folds
from bilevel.problem import Problem, Task

NEWTON_STEPS, ROUNDS = 10, 40


class ProximalCriterion(Criterion):
    """Each output of each fold is a problem of its own, with w of shape (features,)."""

    def __init__(self, X: Any, y: Array, folds: Folds, intercept: bool, l1_ratio: float) -> None:
        self.X, self.y, self.folds, self.intercept, self.l1_ratio = X, y, folds, intercept, l1_ratio
        self.train, self.val = folds.train_weights(), folds.val_weights()
        self.parts = [_Quadratic.of(X, y, s, intercept) for s in self.train]
        self.w = np.zeros((folds.count, X.shape[1], y.shape[1]))
        self.method = (
            "Implicit differentiation of the fixed point of the proximal dynamics (FISTA), on the coefficients that "
            "are not zero: the others do not feel the penalties."
        )

    def restricted(self, folds: Folds) -> Self:
        return type(self)(self.X, self.y, folds, self.intercept, self.l1_ratio)

    def evaluate(self, log_alpha: Array, accuracy: float = EXACT) -> Evaluation:
        alpha, total = np.exp(log_alpha), self.folds.total
        value, gradient = 0.0, np.zeros_like(alpha)
        for k, (part, v) in enumerate(zip(self.parts, self.val, strict=True)):
            judged = np.flatnonzero(v)
            X = self.X[judged]
            for output in range(self.y.shape[1]):
                w, support, solve = part.minimise(self.w[k, :, output], output, alpha, self.l1_ratio)
                self.w[k, :, output] = w
                error = X @ w - part.x_mean @ w + part.y_mean[output] - self.y[judged, output]
                weighted = v[judged] * error / total
                value += 0.5 * float(weighted @ error)
                slope = X.T @ weighted - weighted.sum() * part.x_mean
                q = solve(slope[support])
                felt = self.l1_ratio * np.sign(w[support]) + (1 - self.l1_ratio) * w[support]
                gradient[support] -= alpha[support] * q * felt
        return Evaluation(value, gradient)

    def refit(self, log_alpha: Array) -> tuple[Array, Array]:
        part, alpha = _Quadratic.of(self.X, self.y, self.folds.weight, self.intercept), np.exp(log_alpha)
        starts = self.w.mean(0).T
        columns = [part.minimise(start, m, alpha, self.l1_ratio)[0] for m, start in enumerate(starts)]
        w = np.stack(columns, axis=1)
        return w, part.y_mean - part.x_mean @ w

    def bilevel_problem(self, log_alpha: Array) -> tuple[Problem, Any, Task, Any, dict[str, Any]]:
        self.evaluate(log_alpha)
        X = torch.from_numpy(self.X.toarray() if sparse.issparse(self.X) else self.X)
        y, total, ratio = torch.from_numpy(self.y), self.folds.total, self.l1_ratio
        train, val = torch.from_numpy(self.train)[:, :, None], torch.from_numpy(self.val)[:, :, None]
        share = train / train.sum(1, keepdim=True)
        centre = share if self.intercept else torch.zeros_like(share)

        def errors(w: Tensor) -> Tensor:
            found = X @ w - y
            return found - (centre * found).sum(1, keepdim=True)

        def inner(w: Tensor, lam: Tensor, share: Tensor) -> Tensor:
            ridge = (lam.exp()[:, None] * w**2).sum()
            return 0.5 * (share * errors(w) ** 2).sum() + 0.5 * (1 - ratio) * ridge

        def outer(w: Tensor, lam: Tensor, val: Tensor) -> Tensor:
            return 0.5 * (val * errors(w) ** 2).sum() / total

        problem = Problem(inner, outer, init=lambda lam: torch.zeros(self.w.shape, dtype=lam.dtype))
        steepest = max(part.steepest for part in self.parts) + (1 - ratio) * float(np.exp(log_alpha).max())

        def dynamics(lam: Tensor) -> FISTA:
            return FISTA(1 / steepest, L1(ratio * lam.exp()[:, None]))

        told = {"dynamics": dynamics, "products": 60}
        return problem, torch.from_numpy(log_alpha), Task(share, val), torch.from_numpy(self.w), told


@dataclass(frozen=True)
class _Net:
    """−⟨linear, w⟩ + Σ l1_j |w_j| + ½ Σ l2_j w_j²: what comes to a fold's quadratic."""

    linear: Array
    l1: Array
    l2: Array

    def signs(self, image: Array, lr: float) -> Array:
        """The signs of prox(image); without an L1 part every coefficient is in the support."""
        return np.sign(image) * (np.abs(image) > lr * self.l1) if self.l1.any() else np.ones_like(image)


class _Quadratic:
    """½ wᵀGw − cᵀw, the smooth part of a fold, as a matrix where features are few and as products with X otherwise."""

    def __init__(self, X: Any, y: Array, share: Array, x_mean: Array, y_mean: Array) -> None:
        self.X, self.share, self.x_mean, self.y_mean = X, share, x_mean, y_mean
        self.linear = self._centred_transpose(share[:, None] * (y - y_mean))
        self.gram = self._block(slice(None)) if X.shape[1] <= 3000 else None
        self.steepest = self._largest_curvature()

    @staticmethod
    def of(X: Any, y: Array, s: Array, intercept: bool) -> _Quadratic:
        rows = np.flatnonzero(s)
        share, X, y = s[rows] / s.sum(), X[rows], y[rows]
        x_mean, y_mean = np.asarray(share @ X).reshape(-1), share @ y
        return _Quadratic(X, y, share, x_mean if intercept else 0 * x_mean, y_mean if intercept else 0 * y_mean)

    def minimise(self, w: Array, output: int, alpha: Array, ratio: float) -> tuple[Array, Array, Any]:
        """The minimiser, its support, and products with the inverse of the matrix on it."""
        net = _Net(self.linear[:, output], ratio * alpha, (1 - ratio) * alpha)
        lr = 1 / (self.steepest + float(net.l2.max()))
        for round_ in range(ROUNDS):
            found = self._newton(w, net, lr)
            if found is not None:
                return found
            w = self._proximal_steps(w, net, lr, 50 * (round_ + 1))
        support = np.flatnonzero(w)
        return w, support, self._solver(support, net.l2)

    def _newton(self, w: Array, net: _Net, lr: float) -> tuple[Array, Array, Any] | None:
        """Newton's method for the fixed point of the proximal step, w = prox(w − lr·∇L(w)).

        The map is linear where the signs of its image stay the same, so a step solves a linear system on the support;
        once the signs repeat, w is the fixed point itself. Near it a few steps do; far away they may run in circles,
        and None says so.
        """
        previous, solve = None, None
        for _ in range(NEWTON_STEPS):
            signs = net.signs(w - lr * (self._times(w) + net.l2 * w - net.linear), lr)
            support = np.flatnonzero(signs)
            if previous is not None and np.array_equal(signs, previous):
                return w, support, solve
            solve = self._solver(support, net.l2)
            w = np.zeros_like(w)
            w[support] = solve(net.linear[support] - net.l1[support] * signs[support])
            previous = signs
        return None

    def _proximal_steps(self, w: Array, net: _Net, lr: float, steps: int) -> Array:
        """Accelerated proximal gradient steps (FISTA), which come nearer from anywhere."""
        previous = w
        for t in range(1, steps + 1):
            ahead = w + (t - 1) / (t + 2) * (w - previous)
            image = ahead - lr * (self._times(ahead) + net.l2 * ahead - net.linear)
            previous, w = w, np.sign(image) * np.maximum(np.abs(image) - lr * net.l1, 0)
        return w

    def _solver(self, support: Array, l2: Array) -> Any:
        if len(support) == 0:
            return lambda right: right
        matrix = (self._block(support) if self.gram is None else self.gram[np.ix_(support, support)]).copy()
        matrix.flat[:: len(matrix) + 1] += l2[support]
        try:
            factor = linalg.cho_factor(matrix, lower=True, check_finite=False)
        except linalg.LinAlgError:
            return lambda right: np.linalg.lstsq(matrix, right, rcond=None)[0]
        return lambda right: linalg.cho_solve(factor, right, check_finite=False)

    def _times(self, w: Array) -> Array:
        if self.gram is not None:
            return self.gram @ w
        return self._centred_transpose(self.share * (self.X @ w - self.x_mean @ w))

    def _centred_transpose(self, v: Array) -> Array:
        return self.X.T @ v - np.multiply.outer(self.x_mean, v.sum(0)).reshape(-1, *v.shape[1:])

    def _block(self, columns: Any) -> Array:
        X = self.X[:, columns]
        weighted = X.multiply(self.share[:, None]).tocsr() if sparse.issparse(X) else X * self.share[:, None]
        gram = X.T @ weighted
        gram = gram.toarray() if sparse.issparse(gram) else gram
        mean = self.x_mean[columns]
        return gram - np.outer(mean, mean)

    def _largest_curvature(self) -> float:
        if self.gram is not None:
            size = len(self.gram)
            return max(float(linalg.eigvalsh(self.gram, subset_by_index=(size - 1, size - 1))[0]), 1e-300)
        found = sparse.linalg.eigsh(
            sparse.linalg.LinearOperator((len(self.x_mean),) * 2, matvec=self._times, dtype=np.float64),
            k=1,
            v0=np.ones(len(self.x_mean)),
            return_eigenvectors=False,
        )
        return 1.01 * float(found[0])
