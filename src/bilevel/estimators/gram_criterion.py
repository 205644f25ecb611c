"""The criterion of a linear model with a smooth loss, from few products with X and factors of stale Hessians.

The Hessian of fold k is Σ_c H_c + diag(α) over the cells c that it trains on, and H_c = X_cᵀ D X_c changes slowly with
w. At one point for all folds it is taken once for every cell and kept; at every λ it is scaled to the mean curvature of
the fold's rows, and diag(α) is added. With P_k, the factors of that, w and the adjoint q of a fold are improved
together,

    w ← w − P⁻¹∇L(w),   q ← q + P⁻¹(∇E(w) − H(w)q),

which costs one product with X and one with Xᵀ for both and for all folds. Where L and E were nearly solved for a
neighbouring λ, one or two such sweeps are enough. The point where they end depends on H(w), which is exact, and not on
P: a stale one costs sweeps and no accuracy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import linalg, sparse
from typing_extensions import Self

from bilevel.estimators.criterion import EXACT, Evaluation
from bilevel.estimators.folds import Array, Folds
from bilevel.estimators.linear_problem import LinearProblem
from bilevel.estimators.newton_criterion import NewtonCriterion, factorised, hessians_are_small, solved
from bilevel.problem import Problem, Task

SWEEPS = 12
# The accuracy at which w is left to the certificate.
NEXT_DOOR = 1e-10
# Rows of X that are weighted at once.
BLOCK = 2_000


@dataclass(frozen=True)
class CellHessians:
    """Hessians of the loss at one point.

    Attributes:
        matrices: of the rows of each cell.
        curvature: of each row.
    """

    matrices: Array
    curvature: Array


class GramCriterion(NewtonCriterion):
    """What is kept beside w and q: their images X w and X q, and the slopes there that do not depend on λ."""

    def __init__(self, linear: LinearProblem, grams: CellHessians | None = None) -> None:
        super().__init__(linear)
        self.dense = False
        _, features, outputs = self.linear.shape
        self.grams, self.wasted = grams, 0
        self.scores = self.image = np.zeros(0)
        self.slopes: tuple[Array, Array, Array] | None = None
        self.method = (
            "Implicit differentiation at the minimiser, which Newton steps with a Hessian of "
            f"{features * outputs} × {features * outputs} per fold find that is taken again when it is out of date."
        )

    @staticmethod
    def suits(linear: LinearProblem) -> bool:
        """Whether factors of Hessians cost less than the products with X that they save."""
        size = linear.shape[1] * linear.shape[2]
        return not sparse.issparse(linear.X) and size <= min(20 * linear.X.shape[0] ** 0.5, 3_000)

    def restricted(self, folds: Folds) -> Self:
        fewer = super().restricted(folds)
        # The cells are the same, and so are their Hessians.
        fewer.grams = self.grams
        return fewer

    def evaluate(self, log_alpha: Array, accuracy: float = EXACT) -> Evaluation:
        alpha, folds = self._alpha(log_alpha), len(self.w)
        before = self.w, self.q
        if len(self.scores) == 0:
            self._load()
        slope, outer, bent = self.slopes or self._look()
        factors = factorised(self._stale_hessians(alpha))
        last = np.inf
        for sweep in range(SWEEPS + 1):
            slope_w = slope + self._penalty_slope(self.w, alpha)
            residual = outer - bent - self._penalty_slope(self.q, alpha)
            step, turn = solved(factors, slope_w, residual)
            # Errors of w and q in the norm of the Hessian, relative to their own lengths.
            off = max(_error(slope_w, step, factors, self.w - step), _error(residual, turn, factors, self.q + turn))
            # The step that is known now will shrink them about as the last one did.
            if off * (min(off / last, 1.0) if sweep else 1.0) <= accuracy:
                break
            if sweep == SWEEPS or not off < 4 * last:
                return self._afresh(log_alpha, accuracy, before)
            last = off
            moved = self.linear.scores(np.concatenate([-step, turn]))
            self.w, self.q = self.w - step, self.q + turn
            self.scores, self.image = self.scores + moved[:, :folds], self.image + moved[:, folds:]
            slope, outer, bent = self._look()
        self._refresh(sweep)
        # What the last step would bring is known to first order, without another product.
        w, q = self.w - step, self.q + turn
        share = self.val / self.folds.total
        value = float((share * self.loss.values(self.scores, self.y)).sum()) - float((q * slope_w).sum())
        return Evaluation(value, -(alpha[:, None] * q * w).sum((0, 2))[: len(log_alpha)])

    def _look(self) -> tuple[Array, Array, Array]:
        """Xᵀ times: the slopes of L without penalties, those of E, and H q without penalties, at w; one product."""
        slopes, curvatures = self.loss.slopes(self.scores, self.y), self.loss.curvatures(self.scores)
        train, share = self.train[:, :, None], (self.val / self.folds.total)[:, :, None]
        parts = np.concatenate([train * slopes, share * slopes, train * self.loss.bend(curvatures, self.image)], axis=1)
        slope, outer, bent = np.split(self.linear.transposed(parts), 3)
        self.slopes = slope, outer, bent
        return self.slopes

    def _load(self) -> None:
        images = self.linear.scores(np.concatenate([self.w, self.q]))
        self.scores, self.image = images[:, : len(self.w)], images[:, len(self.w) :]

    def _afresh(self, log_alpha: Array, accuracy: float, start: tuple[Array, Array]) -> Evaluation:
        """By Newton's method with a line search, and with Hessians of where that ends from then on."""
        self.w, self.q = start
        found = super().evaluate(log_alpha, accuracy)
        self._load()
        self.slopes = None
        self._take_hessians()
        return found

    def _refresh(self, sweeps: int) -> None:
        """Take the Hessians again, once the sweeps that better ones would have saved have cost as much."""
        self.wasted += max(sweeps - 2, 0)
        folds, features, outputs = self.linear.shape
        if 30 * folds * self.wasted > features * outputs:
            self._take_hessians()

    def _take_hessians(self) -> None:
        mean = self.scores.mean(1, keepdims=True)
        self.grams, self.wasted = CellHessians(self._cell_hessians(mean), self._curvature(mean)), 0

    def _stale_hessians(self, alpha: Array, smallest: bool = False) -> Array:
        """Those that were taken, scaled to the mean or the smallest curvature that the rows of a fold have now."""
        if len(self.scores) == 0:
            self._load()
        if self.grams is None:
            self._take_hessians()
        assert self.grams is not None
        sums = np.tensordot(self.linear.folds.train.astype(float), self.grams.matrices, 1)
        there, here = self.grams.curvature, self._curvature(self.scores)
        if smallest:
            ratio = np.where(self.train > 0, here / np.maximum(there, 1e-300), np.inf).min(0)
        else:
            ratio = (self.train * here).sum(0) / np.maximum((self.train * there).sum(0), 1e-300)
        return self._penalised(sums * ratio[:, None, None], alpha)

    def _curvature(self, scores: Array) -> Array:
        """Of the loss for every row and fold, the sum over outputs."""
        curvatures = self.loss.curvatures(scores)
        parts = [self.loss.bend(curvatures, unit)[..., a] for a, unit in enumerate(np.eye(scores.shape[-1]))]
        return np.sum(parts, axis=0)

    def _cell_hessians(self, scores: Array) -> Array:
        """Of the loss on the rows of every cell, at the scores of one point for all folds."""
        _, features, outputs = self.linear.shape
        folds, curvatures = self.linear.folds, self.loss.curvatures(scores)
        found = np.zeros((folds.train.shape[1], outputs, features, outputs, features))
        for a in range(outputs):
            unit = np.zeros((1, 1, outputs))
            unit[..., a] = 1
            columns = folds.weight[:, None] * self.loss.bend(curvatures, unit)[:, 0]
            for b in range(a, outputs):
                for cell, gram in enumerate(found[:, a, :, b]):
                    self._add_gram(gram, np.flatnonzero(folds.cell == cell), columns[:, b])
                found[:, b, :, a] = found[:, a, :, b]
        return found.transpose(0, 2, 1, 4, 3).reshape(len(found), features * outputs, -1)

    def _add_gram(self, gram: Array, rows: Array, weight: Array) -> None:
        """Xᵀ diag(weight) X over some rows, block by block: a weighted copy of all of X would cost more than this."""
        features = self.X.shape[1]
        signed = bool((weight < 0).any())
        for first in range(0, len(rows), BLOCK):
            some = rows[first : first + BLOCK]
            block, part = self.X[some], weight[some, None]
            if self.linear.free:
                sums = (block * part).sum(0) if signed else part[:, 0] @ block
                gram[features, :features] += sums
                gram[:features, features] += sums
                gram[features, features] += part.sum()
            if signed:
                gram[:features, :features] += block.T @ (block * part)
            else:
                block *= np.sqrt(part)
                gram[:features, :features] += block.T @ block

    def bilevel_problem(self, log_alpha: Array) -> tuple[Problem, Any, Task, Any, dict[str, Any]]:
        """With a bound on μ: the Hessians of the cells, shrunk to where no row's curvature is smaller than assumed."""
        self.evaluate(log_alpha, NEXT_DOOR)
        problem, task = self.linear.for_engine()
        told: dict[str, Any] = {"products": 30}
        if self.y.shape[-1] == 1:
            shrunk = self._stale_hessians(self._alpha(log_alpha), smallest=True)
            told = {"products": 4, "mu": min(linalg.eigvalsh(matrix, subset_by_index=(0, 0))[0] for matrix in shrunk)}
        return problem, torch.from_numpy(log_alpha), task, torch.from_numpy(self.w), told

    def _preconditioner(self, alpha: Array) -> Callable[[Array], Array]:
        factors = factorised(self._stale_hessians(alpha))
        return lambda residual: solved(factors, residual)


def newton_criterion(linear: LinearProblem) -> NewtonCriterion:
    """The way that is fastest for this size."""
    small = hessians_are_small(linear) or not GramCriterion.suits(linear)
    return NewtonCriterion(linear) if small else GramCriterion(linear)


def _error(slope: Array, step: Array, factors: list[Array], v: Array) -> float:
    """(stepᵀP step / vᵀP v)^½ of the worst fold, where step = P⁻¹ slope."""
    halves = [linalg.blas.dtrmv(f, x.reshape(-1), lower=1, trans=1) for f, x in zip(factors, v, strict=True)]
    lengths = np.maximum(np.square(halves).sum(1), 1e-300)
    return float(np.sqrt((slope * step).sum((1, 2)) / lengths).max())
