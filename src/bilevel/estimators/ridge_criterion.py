"""The ridge criterion in closed form: normal equations where rows abound, kernel equations where features do.

Fold k minimises ½ Σ_i s_i ‖y_i − x_i w‖² + ½ Σ_j α_j ‖w_j‖² over its rows, and is judged by half the squared error on
those held out. With A_k = XᵀSX + diag(α), w_k = A_k⁻¹XᵀSy and q_k = A_k⁻¹∇E_k, implicit differentiation of ∇L = 0 gives
∂f/∂log α_j = −α_j Σ_k ⟨q_kj, w_kj⟩: one factorisation of A_k serves the fit and its hypergradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import linalg, sparse
from typing_extensions import Self

from bilevel.estimators.criterion import EXACT, Criterion, Evaluation
from bilevel.estimators.folds import Array, Folds
from bilevel.estimators.linear_problem import LinearProblem
from bilevel.estimators.losses import SquaredError
from bilevel.problem import Problem, Task


@dataclass(frozen=True)
class Moments:
    """Weighted sums over rows, which add up over cells of rows."""

    xx: Array
    xy: Array
    yy: float
    x: Array
    y: Array
    weight: float

    @staticmethod
    def of(X: Any, y: Array, s: Array) -> Moments:
        weighted = X.multiply(s[:, None]).tocsr() if sparse.issparse(X) else X * s[:, None]
        xx = weighted.T @ X
        return Moments(
            xx.toarray() if sparse.issparse(xx) else xx,
            weighted.T @ y,
            float((s[:, None] * y**2).sum()),
            np.asarray(weighted.sum(0)).reshape(-1),
            s @ y,
            float(s.sum()),
        )

    def __add__(self, other: Moments) -> Moments:
        return Moments(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def about(self, x: Array, y: Array) -> Moments:
        """The moments of the rows with x and y subtracted."""
        cross = np.outer(self.x, x)
        return Moments(
            self.xx - cross - cross.T + self.weight * np.outer(x, x),
            self.xy - np.outer(self.x, y) - np.outer(x, self.y) + self.weight * np.outer(x, y),
            float(self.yy - 2 * self.y @ y + self.weight * y @ y),
            self.x - self.weight * x,
            self.y - self.weight * y,
            self.weight,
        )


class NormalEquations(Criterion):
    """A_k as a matrix of features × features, whatever the number of rows: the data are seen once."""

    def __init__(self, moments: list[Moments], folds: Folds, intercept: bool, shared: bool) -> None:
        self.moments, self.folds, self.intercept, self.shared = moments, folds, intercept, shared
        self.pairs = [(self._sum(train), self._sum(val)) for train, val in zip(folds.train, folds.val, strict=True)]
        if intercept:
            self.pairs = [(t.about(*_means(t)), v.about(*_means(t))) for t, v in self.pairs]
        self.solvers = [_Spectral(train.xx) if shared else _Cholesky(train.xx) for train, _ in self.pairs]
        size = len(moments[0].x)
        way = "one eigendecomposition per fold, good for every penalty" if shared else "one Cholesky factor per fold"
        self.method = (
            f"Implicit differentiation of the normal equations ({size} × {size}, {way}): rows outnumber features, and "
            "the cost of a hypergradient does not depend on them."
        )

    @classmethod
    def of(cls, X: Any, y: Array, folds: Folds, intercept: bool, shared: bool) -> Self:
        rows = [np.flatnonzero(folds.cell == cell) for cell in range(folds.train.shape[1])]
        return cls([Moments.of(X[i], y[i], folds.weight[i]) for i in rows], folds, intercept, shared)

    def _sum(self, cells: Array) -> Moments:
        return sum(
            (self.moments[i] for i in np.flatnonzero(cells)[1:]), start=self.moments[int(np.flatnonzero(cells)[0])]
        )

    def restricted(self, folds: Folds) -> Self:
        return type(self)(self.moments, folds, self.intercept, self.shared)

    def evaluate(self, log_alpha: Array, accuracy: float = EXACT) -> Evaluation:
        alpha, total = np.exp(log_alpha), self.folds.total
        value, gradient = 0.0, np.zeros_like(alpha)
        for (train, val), solver in zip(self.pairs, self.solvers, strict=True):
            solve = solver.at(alpha)
            w = solve(train.xy)
            image = val.xx @ w
            value += 0.5 * max(float((w * (image - 2 * val.xy)).sum()) + val.yy, 0.0) / total
            gradient -= (solve((image - val.xy) / total) * w).sum(1) * alpha
        return Evaluation(value, gradient)

    def refit(self, log_alpha: Array) -> tuple[Array, Array]:
        everything = self._sum(np.ones(len(self.moments), dtype=bool))
        x, y = _means(everything) if self.intercept else (0 * everything.x, 0 * everything.y)
        centred = everything.about(x, y)
        w = _Cholesky(centred.xx).at(np.exp(log_alpha))(centred.xy)
        return w, y - x @ w

    def bilevel_problem(self, log_alpha: Array) -> tuple[Problem, Any, Task, Any, dict[str, Any]]:
        alpha = np.exp(log_alpha)
        w = np.stack([solver.at(alpha)(train.xy) for (train, _), solver in zip(self.pairs, self.solvers, strict=True)])
        train, val = (
            tuple(torch.from_numpy(np.stack([getattr(pair[side], name) for pair in self.pairs])) for name in names)
            for side, names in ((0, ("xx", "xy")), (1, ("xx", "xy", "yy")))
        )
        total = self.folds.total

        def inner(w: Any, lam: Any, data: Any) -> Any:
            xx, xy = data
            return 0.5 * (w * (xx @ w)).sum() - (w * xy).sum() + 0.5 * (lam.exp()[:, None] * w**2).sum()

        def outer(w: Any, lam: Any, data: Any) -> Any:
            xx, xy, yy = data
            return 0.5 * ((w * (xx @ w - 2 * xy)).sum() + yy.sum()) / total

        problem = Problem(inner, outer, init=lambda lam: torch.zeros(w.shape, dtype=lam.dtype))
        smallest = min(float(linalg.eigvalsh(t.xx + np.diag(alpha), subset_by_index=(0, 0))[0]) for t, _ in self.pairs)
        told = {"mu": smallest} if smallest > 0 else {}
        return problem, torch.from_numpy(log_alpha), Task(train, val), torch.from_numpy(w), told


class KernelEquations(Criterion):
    """A_k through X diag(1/α) Xᵀ, a matrix of rows × rows: w_k = diag(1/α) Xᵀ u_k lies in the span of the rows."""

    def __init__(self, X: Any, y: Array, folds: Folds, intercept: bool) -> None:
        self.X, self.y, self.folds, self.intercept = X, y, folds, intercept
        self.train, self.val = folds.train_weights(), folds.val_weights()
        rows, features = X.shape
        self.method = (
            f"Implicit differentiation of the kernel equations (up to {rows} × {rows}, one Cholesky factor per fold): "
            f"features ({features}) outnumber rows."
        )

    def restricted(self, folds: Folds) -> Self:
        return type(self)(self.X, self.y, folds, self.intercept)

    def evaluate(self, log_alpha: Array, accuracy: float = EXACT) -> Evaluation:
        alpha, total, outputs = np.exp(log_alpha), self.folds.total, self.y.shape[1]
        kernel = _kernel(self.X, alpha)
        value, dual, adjoint = 0.0, [], []
        for s, v in zip(self.train, self.val, strict=True):
            fold = _KernelFold(kernel, self.y, s, self.intercept)
            judged = v > 0
            error = fold.predict(judged) - self.y[judged]
            value += 0.5 * float((v[judged, None] * error**2).sum()) / total
            dual.append(fold.dual)
            adjoint.append(fold.adjoint(judged, v[judged, None] * error / total))
        # Both are Xᵀ(·)/α; one product with X serves all folds.
        w, q = np.split(self.X.T @ np.hstack(dual + adjoint) / alpha[:, None], [outputs * len(dual)], axis=1)
        return Evaluation(value, -(q * w).sum(1) * alpha)

    def refit(self, log_alpha: Array) -> tuple[Array, Array]:
        alpha = np.exp(log_alpha)
        fold = _KernelFold(_kernel(self.X, alpha), self.y, self.folds.weight, self.intercept)
        w = self.X.T @ fold.dual / alpha[:, None]
        return w, fold.mean_y - fold.share @ (self.X @ w) if self.intercept else 0 * fold.mean_y

    def bilevel_problem(self, log_alpha: Array) -> tuple[Problem, Any, Task, Any, dict[str, Any]]:
        alpha = np.exp(log_alpha)
        kernel = _kernel(self.X, alpha)
        w = [self.X.T @ _KernelFold(kernel, self.y, s, self.intercept).dual / alpha[:, None] for s in self.train]
        linear = LinearProblem(self.X, self.y, self.folds, SquaredError(), centred=self.intercept)
        problem, task = linear.for_engine()
        # The smallest curvature is that of the penalty: there are more directions than rows.
        told = {"mu": float(alpha.min())}
        return problem, torch.from_numpy(log_alpha), task, torch.from_numpy(np.stack(w)), told


class _KernelFold:
    """The fit of one fold: (I + S^½ K_c S^½) u = S^½ (y − ȳ), with K_c centred at the fold's own means."""

    def __init__(self, kernel: Array, y: Array, s: Array, intercept: bool) -> None:
        self.share = s / s.sum() if intercept else np.zeros_like(s)
        self.mean_y = self.share @ y
        # Centred at the mean of x: K_c = (I − 1 shareᵀ) K (I − share 1ᵀ).
        middle = kernel @ self.share
        self.kernel = kernel - middle[:, None] - middle[None, :] + self.share @ middle
        self.trained = s > 0
        self.root = np.sqrt(s[self.trained])[:, None]
        block = self.root * self.kernel[np.ix_(self.trained, self.trained)] * self.root.T
        block.flat[:: len(block) + 1] += 1
        self.factor = linalg.cho_factor(block, lower=True, overwrite_a=True, check_finite=False)
        self.u = self._solve(y[self.trained] - self.mean_y)

    def _solve(self, right: Array) -> Array:
        return self.root * linalg.cho_solve(self.factor, self.root * right, check_finite=False)

    def predict(self, rows: Array) -> Array:
        return self.kernel[np.ix_(rows, self.trained)] @ self.u + self.mean_y

    @property
    def dual(self) -> Array:
        """u as coefficients of the uncentred rows: w = diag(1/α) Xᵀ dual."""
        return self._uncentred(self.trained, self.u)

    def adjoint(self, rows: Array, slope: Array) -> Array:
        """q = A⁻¹ X_cᵀ slope as coefficients of the rows, by Woodbury's identity."""
        behind = self._solve(self.kernel[np.ix_(self.trained, rows)] @ slope)
        return self._uncentred(rows, slope) - self._uncentred(self.trained, behind)

    def _uncentred(self, rows: Array, coefficients: Array) -> Array:
        full = np.zeros((len(self.share), coefficients.shape[1]))
        full[rows] = coefficients
        return full - np.outer(self.share, coefficients.sum(0))


class _Cholesky:
    def __init__(self, matrix: Array) -> None:
        self.matrix = matrix

    def at(self, alpha: Array) -> Any:
        shifted = self.matrix.copy()
        shifted.flat[:: len(shifted) + 1] += alpha
        try:
            factor = linalg.cho_factor(shifted, lower=True, overwrite_a=True, check_finite=False)
        except linalg.LinAlgError:
            # Penalties at the rounding level of XᵀX leave it singular; the least-norm solution is the limit.
            shifted = self.matrix + np.diag(alpha)
            return lambda right: np.linalg.lstsq(shifted, right, rcond=None)[0]
        return lambda right: linalg.cho_solve(factor, right, check_finite=False)


class _Spectral:
    """(M + α I)⁻¹ for any α from one eigendecomposition of M."""

    def __init__(self, matrix: Array) -> None:
        self.values, self.vectors = linalg.eigh(matrix, check_finite=False)

    def at(self, alpha: Array) -> Any:
        shifted = (self.values.clip(0) + alpha[0])[:, None]
        return lambda right: self.vectors @ ((self.vectors.T @ right) / shifted)


def _kernel(X: Any, alpha: Array) -> Array:
    if sparse.issparse(X):
        return np.asarray((X.multiply(1 / alpha) @ X.T).todense())
    scaled = X / np.sqrt(alpha)
    return scaled @ scaled.T


def _means(moments: Moments) -> tuple[Array, Array]:
    return moments.x / moments.weight, moments.y / moments.weight
