"""Linear models with a smooth loss by Newton's method on all folds at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from bilevel.engine.process import Process
from bilevel.errors import BilevelError
from bilevel.methods.linear_models._at_minimiser import LinearModelMethod, Minimum, start_of
from bilevel.methods.linear_models._shared_work import Parts, fold_parts, row_blocks
from bilevel.structures.linear_models import LinearModels, RowBatch
from bilevel.structures.losses import SquaredError
from bilevel.trees import Tree

NEWTON_STEPS = 50
# Hessians are built if computing all of them once takes at most this many floating-point operations.
LARGEST = 3e7

# Solves H_k x_k = b_k for all folds, to a relative accuracy, from a start.
Solve: TypeAlias = Callable[[Tensor, float, Tensor | None], Tensor]


@dataclass(frozen=True)
class NewtonLinear(LinearModelMethod):
    """Newton's method with a line search for `LinearModels`, then q_k = ∇E_k H_k⁻¹ with the Hessian at the minimiser.

    Args:
        tol: the relative residual of the adjoint q, where it is computed by conjugate gradients, and a bound on the
            relative error of w, which is much smaller by the quadratic convergence of Newton's method.
        dense: True solves with Cholesky factors of the folds' Hessians, False with conjugate gradients, which need only
            products with X. None chooses what is faster for the size.
    """

    tol: float = 1e-8
    dense: bool | None = None
    structure: ClassVar[type | None] = LinearModels
    weighs_rows: ClassVar[bool] = True

    def minimum(self, process: Process) -> Minimum:
        w = start_of(process)
        rows = PenalisedRows(process.problem.inner, process.bound.task.train, process.bound.lam)
        dense = hessians_are_small(rows.X.shape[0], w.shape) if self.dense is None else self.dense
        solver = rows.cholesky if dense else rows.conjugate_gradients
        w, scores = minimise(rows, w, solver, self.tol)
        solve = solver(scores)
        block_diagonal = w.shape[1] == 1 or isinstance(rows.model.loss, SquaredError)
        return Minimum(
            w,
            lambda right: solve(right, self.tol, process.adjoint),
            block_diagonal,
            bytes=scores.nbytes,
            in_weights=None if rows.model.weight is None else lambda q: rows.in_weights(scores, q),
        )


class PenalisedRows:
    """A `LinearModels` objective at one λ."""

    def __init__(self, model: Any, batch: RowBatch, lam: Tree) -> None:
        self.model = model
        self.X, self.y, self.share = batch
        self.weight = model.weights(lam, self.share).detach()
        self.alpha = model.penalties(lam, self.X.shape[1] + model.intercept).detach()

    def scores(self, w: Tensor) -> Tensor:
        return self.model.scores(w, self.X)

    def values(self, w: Tensor, scores: Tensor) -> Tensor:
        """L of every fold."""
        penalty = 0.5 * (w * self.model.pulled(w, self.alpha)).sum((1, 2))
        return (self.weight * self.model.loss.values(scores, self.y)).sum(1) + penalty

    def slope(self, w: Tensor, scores: Tensor) -> Tensor:
        pulls = self.weight[:, None] * self.model.loss.slopes(scores, self.y)
        return self.model.transposed(pulls, self.X) + self.model.pulled(w, self.alpha)

    def in_weights(self, scores: Tensor, q: Tensor) -> Tensor:
        """⟨q, ∂∇L⟩ with the derivative in ω."""
        return (self.share * (self.model.loss.slopes(scores, self.y) * self.scores(q)).sum(1)).sum(0)

    def cholesky(self, scores: Tensor) -> Solve:
        (folds, outputs, rows), size = scores.shape, len(self.alpha)
        parts = fold_parts(folds, folds * rows * (outputs * size) ** 2)
        solve = parts.solver(lambda here: partial(solved, factorised(self.hessians(scores, here))))
        return lambda right, tol, start: solve(right)

    def hessians(self, scores: Tensor, part: slice = slice(None)) -> Tensor:
        """One matrix for every fold of a part, over coefficients in the order (output, feature)."""
        return self.penalised(self.unpenalised_hessians(scores, part))

    def unpenalised_hessians(self, scores: Tensor, part: slice = slice(None)) -> Tensor:
        """The Hessians of the losses alone."""
        scores, weight = scores[part], self.weight[part]
        X = self._columns
        folds, outputs, rows = scores.shape
        size = X.shape[1]
        blocks = scores.new_empty(folds, outputs, size, outputs, size)
        for a in range(outputs):
            curvature = weight[:, None] * self.model.loss.hessian_column(scores, self.y, a)
            # One product for all folds of the part and the outputs from a on: block (b, a) equals block (a, b).
            columns = (X[:, None] * curvature[:, a:].reshape(-1, rows).mT[:, :, None]).reshape(rows, -1)
            found = (X.mT @ columns).reshape(size, folds, outputs - a, size)
            blocks[:, a, :, a:] = found.movedim(1, 0)
            blocks[:, a + 1 :, :, a] = found[:, :, 1:].permute(1, 2, 0, 3)
        return blocks.reshape(folds, outputs * size, -1)

    @cached_property
    def _row_blocks(self) -> tuple[Parts, list[Any]]:
        """The blocks of rows in which products with the Hessian are computed, and X in each of them."""
        # Products with a sparse X take time for its non-zero entries only.
        entries = self.X.numel() if isinstance(self.X, Tensor) else self.X.nnz
        blocks = row_blocks(self.X.shape[0], 4 * entries * len(self.weight) * len(self.y))
        return blocks, [self.X] if len(blocks.slices) == 1 else [self.X[block] for block in blocks.slices]

    @cached_property
    def _columns(self) -> Tensor:
        """X with a column of ones for the intercept."""
        X = self.X if isinstance(self.X, Tensor) else torch.from_numpy(self.X.toarray())
        return torch.cat([X, X.new_ones(len(X), 1)], 1) if self.model.intercept else X

    @cached_property
    def _diagonal(self) -> Tensor:
        """The diagonal of the Hessians without penalties, if every row had the largest curvature of the loss."""
        squares = self.X.square() if isinstance(self.X, Tensor) else self.X.multiply(self.X).tocsr()
        return self.model.loss.steepest * self.model.transposed(self.weight[:, None], squares)

    def penalised(self, matrices: Tensor) -> Tensor:
        """The matrices with the curvature of the penalties added in place."""
        size = len(self.alpha)
        outputs = matrices.shape[-1] // size
        matrices.diagonal(dim1=1, dim2=2).add_(self.alpha.repeat(outputs))
        if self.model.intercept and self.model.loss.only_differences and outputs > 1:
            matrices[:, size - 1 :: size, size - 1 :: size] += 1
        return matrices

    def conjugate_gradients(self, scores: Tensor, precondition: Callable[[Tensor], Tensor] | None = None) -> Solve:
        """Each fold has its own recurrence, and a product with X serves all of them."""
        if bool((self.alpha < 0).any()):
            raise BilevelError(
                "A penalty is negative, and conjugate gradients cannot tell whether the inner objective then has a "
                "minimum. Use penalties ≥ 0, or NewtonLinear(dense=True)."
            )
        precondition = precondition or self._by_diagonal(scores.shape[1])
        blocks, tables = self._row_blocks

        def times(v: Tensor) -> Tensor:
            def image(block: int) -> Tensor:
                here, X = blocks.slices[block], tables[block]
                image = self.model.loss.hessian_times(scores[..., here], self.y[:, here], self.model.scores(v, X))
                return self.model.transposed(self.weight[:, None, here] * image, X)

            return blocks.sum(image, torch.empty_like(v)) + self.model.pulled(v, self.alpha)

        def solve(right: Tensor, tol: float, start: Tensor | None) -> Tensor:
            x = torch.zeros_like(right) if start is None else start.clone()
            residual = right - times(x) if start is not None else right.clone()
            target, tiny = tol * _norms(right), torch.finfo(right.dtype).tiny
            direction = preconditioned = precondition(residual)
            slope = (residual * preconditioned).sum((1, 2))
            for _ in range(1000):
                if bool((_norms(residual) <= target).all()):
                    break
                image = times(direction)
                length = slope / (direction * image).sum((1, 2)).clamp(min=tiny)
                x = x + length[:, None, None] * direction
                residual = residual - length[:, None, None] * image
                preconditioned = precondition(residual)
                before, slope = slope, (residual * preconditioned).sum((1, 2))
                direction = preconditioned + (slope / before.clamp(min=tiny))[:, None, None] * direction
            return x

        return solve

    def _by_diagonal(self, outputs: int) -> Callable[[Tensor], Tensor]:
        size = self._diagonal + self.alpha + float(self.model.loss.only_differences and outputs > 1)
        return lambda residual: residual / size


def minimise(
    rows: PenalisedRows, w: Tensor, solver: Callable[[Tensor], Solve], tol: float = 0.0, solve: Solve | None = None
) -> tuple[Tensor, Tensor]:
    """The folds' minimisers from w, and the scores there.

    Args:
        solver: solves with the Hessians at some scores.
        tol: a bound on the relative error of w; 0 is as accurate as rounding allows.
        solve: solves with the Hessians at w, if they are known.
    """
    scores = rows.scores(w)
    value = rows.values(w, scores)
    done = torch.zeros(len(w), dtype=torch.bool, device=w.device)
    # The relative accuracy of the linear systems. A larger tolerance for w allows less accurate steps.
    accuracy = min(max(1e-4, 10 * tol), 0.1)
    negligible = max(1e-13, 10 * torch.finfo(w.dtype).eps, 0.01 * tol**2)
    for _ in range(NEWTON_STEPS):
        slope, solve = rows.slope(w, scores), solve or solver(scores)
        step = solve(slope, accuracy, None)
        decrease, moved = (slope * step).sum((1, 2)), rows.scores(step)
        # Convergence is quadratic here, so this step is the last one of such a fold.
        near = decrease <= negligible * value.abs()
        size, value = _line_search(rows, (w, scores), (step, moved), value, decrease, near)
        size = size.masked_fill(done, 0)[:, None, None]
        w, scores = w - size * step, scores - size * moved
        done |= near | (size[:, 0, 0] == 0)
        if bool(done.all()):
            break
        # Close to the minimisers the Hessians hardly change, so that the next step can use the same ones.
        if bool((decrease > tol * value.abs()).any()):
            solve = None
    return w, scores


def _line_search(
    rows: PenalisedRows,
    point: tuple[Tensor, Tensor],
    step: tuple[Tensor, Tensor],
    value: Tensor,
    decrease: Tensor,
    near: Tensor,
) -> tuple[Tensor, Tensor]:
    """The fraction of its step that each fold takes, halved until L falls enough or the fold is near, and L there."""
    size = torch.ones_like(value)
    for _ in range(30):
        factor = size[:, None, None]
        there = rows.values(point[0] - factor * step[0], point[1] - factor * step[1])
        short = ~(there <= value - 1e-4 * size * decrease) & ~near
        if not bool(short.any()):
            return size, there
        size = torch.where(short, size / 2, size)
    return size.masked_fill(short, 0), torch.where(short, value, there)


def hessians_are_small(rows: int, shape: torch.Size) -> bool:
    """Whether building every fold's Hessian costs less than the products with X that it saves."""
    folds, outputs, features = shape
    size = features * outputs
    return folds * rows * size**2 <= LARGEST and folds * size**2 <= 2e8


def factorised(matrices: Tensor) -> Tensor:
    """Cholesky factors; the matrices are overwritten."""
    # Rows that are classified with certainty have no curvature, and rounding could make it negative. What is added is
    # relative to each diagonal entry, so it does not depend on the units of the other features.
    diagonal = matrices.diagonal(dim1=1, dim2=2)
    diagonal.add_(1e-14 * torch.where(diagonal > 0, diagonal, diagonal.amax(1, keepdim=True)))
    factors, failed = torch.linalg.cholesky_ex(matrices)
    if bool(failed.any()):
        raise BilevelError(
            "The Hessian of a fold is not positive definite. Use larger penalties, or scale the features."
        )
    return factors


def solved(factors: Tensor, right: Tensor) -> Tensor:
    """H_k⁻¹ b_k for every fold, for one b of the shape folds × outputs × features, or many: folds × many × …."""
    columns = right.reshape(len(right), -1, factors.shape[-1]).mT
    return torch.cholesky_solve(columns, factors).mT.reshape(right.shape)


def _norms(v: Tensor) -> Tensor:
    return v.square().sum((1, 2)).sqrt()
