"""Linear models with a smooth loss, with few products with X and with factorised Hessians that are reused.

The Hessian of fold k is Σ_c H_c + diag(α) over the cells c of rows that it trains on, and H_c = X_cᵀ D X_c changes
slowly with w. H_c is computed once for every cell and kept. At every λ it is scaled to the mean curvature of the rows
of a fold, and diag(α) is added. With P_k the factorised sum, w and the adjoint q of a fold are improved together,

    w ← w − P⁻¹∇L(w),   q ← q + P⁻¹(∇E(w) − H(w)q),

which costs one product with X and one with Xᵀ for both and for all folds. From the solutions for a nearby λ, one or
two such sweeps are enough. Their limit depends on H(w), which is exact, and not on P: an old P costs sweeps and no
accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bilevel.engine.method import Hypergradient
from bilevel.engine.process import Process
from bilevel.errors import BilevelError
from bilevel.methods.linear_models._at_minimiser import LinearModelMethod, Minimum, start_of
from bilevel.methods.linear_models.newton_linear import NewtonLinear, PenalisedRows, factorised, minimise, solved
from bilevel.structures.held_out import HeldOutLoss
from bilevel.structures.linear_models import LinearModels

SWEEPS = 12
# Rows of X that are weighted at once.
BLOCK = 2_000


@dataclass(frozen=True)
class StaleNewton(LinearModelMethod):
    """Newton steps with outdated Hessians, for `LinearModels` on a dense table.

    The state at one λ, Hessians included, is reused at the next: it is in the result's `adjoint`, which `solve` passes
    on with `start="warm"`. If the sweeps do not converge, Newton's method with a line search is used. An outer
    objective that is a `HeldOutLoss` on the same table X shares its products with X.

    Args:
        tol: the relative error of w and q, in the norm of the Hessian, at which the sweeps end. The error of the value
            is of the order of its square.
    """

    tol: float = 1e-8
    structure: ClassVar[type | None] = LinearModels

    def check(self, process: Process) -> None:
        super().check(process)
        if not isinstance(process.bound.task.train[0], Tensor):
            raise BilevelError("StaleNewton needs X as a dense tensor. Use NewtonLinear().")

    def minimum(self, process: Process) -> Minimum:
        return NewtonLinear(self.tol, dense=True).minimum(process)

    def at_minimiser(self, process: Process) -> Hypergradient:
        sweeps = _Sweeps(process, start_of(process))
        w, q, value = sweeps.run(self.tol)
        direct = None
        if sweeps.held_out is None:
            value, _, direct, _ = process.outer_gradients((w, ()))
        kept = sweeps.saved(w)
        return self.from_adjoint(process, w, q, value, direct, kept=kept, peak_memory=sweeps.hessians.matrices.nbytes)


@dataclass(frozen=True, eq=False)
class CellHessians:
    """Hessians of the loss on the rows of each cell, and each row's curvature, all at one point.

    Rows that every fold treats alike form a cell. `members` says which folds train on which cell.
    """

    matrices: Tensor
    curvature: Tensor
    members: Tensor


@dataclass(frozen=True, eq=False)
class SweepState:
    """The state that is reused at the next λ: w and q where the sweeps ended, their images under X, and Hessians.

    Attributes:
        reported: the w that was returned, which is one step ahead.
        slopes: Xᵀ times the slopes of L without penalties, of E, and H q without penalties, at w and q.
        wasted: the number of sweeps that up-to-date Hessians would have saved.
        data: the tensors from which all of this was computed.
    """

    reported: Tensor
    w: Tensor
    q: Tensor
    scores: Tensor
    image: Tensor
    slopes: tuple[Tensor, Tensor, Tensor] | None
    hessians: CellHessians
    wasted: int
    data: tuple[Tensor, ...]


class _Sweeps:
    def __init__(self, process: Process, w: Tensor) -> None:
        self.rows = PenalisedRows(process.problem.inner, process.bound.task.train, process.bound.lam)
        self.process, self.loss, self.weight = process, self.rows.model.loss, self.rows.weight
        # The weights of the rows that are held out, if E is a loss on the rows of X; otherwise None.
        self.held_out = _held_out(process)
        self.data = (
            self.rows.X,
            self.rows.y,
            self.weight,
            *(() if self.held_out is None else [process.bound.task.val[2]]),
        )
        saved: Any = process.adjoint
        if isinstance(saved, SweepState) and saved.reported.equal(w) and _same_storage(saved.data, self.data):
            self.w, self.q, self.scores, self.image = saved.w, saved.q, saved.scores, saved.image
            self.slopes, self.hessians, self.wasted = saved.slopes, saved.hessians, saved.wasted
        else:
            self.w, self.q = w, torch.zeros_like(w)
            self.scores = self.rows.scores(w)
            self.image, self.slopes = torch.zeros_like(self.scores), None
            self._compute_hessians()

    def saved(self, w: Tensor) -> SweepState:
        slopes = None if self.held_out is None else self.slopes
        return SweepState(w, self.w, self.q, self.scores, self.image, slopes, self.hessians, self.wasted, self.data)

    def run(self, tol: float) -> tuple[Tensor, Tensor, Tensor]:
        """w, q and E."""
        model, alpha, folds = self.rows.model, self.rows.alpha, len(self.w)
        start = self.w, self.scores
        slope, outer, hessian_q = self.slopes or self._compute_slopes()
        factors = factorised(self._stale_hessians())
        last = torch.inf
        for sweep in range(SWEEPS + 1):
            slope_w = slope + model.pulled(self.w, alpha)
            residual = outer - hessian_q - model.pulled(self.q, alpha)
            step, q_step = solved(factors, slope_w, residual)
            # Errors of w and q in the norm of the Hessian, relative to their own lengths.
            error = max(
                _error(slope_w, step, factors, self.w - step), _error(residual, q_step, factors, self.q + q_step)
            )
            # The step just computed is expected to reduce the errors by the same factor as the last one.
            if error * (min(error / last, 1.0) if sweep else 1.0) <= tol:
                break
            if sweep == SWEEPS or not error < 4 * last:
                return self._by_newton(start, tol)
            last = error
            moved = self.rows.scores(torch.cat([-step, q_step]))
            self.w, self.q = self.w - step, self.q + q_step
            self.scores, self.image = self.scores + moved[:folds], self.image + moved[folds:]
            slope, outer, hessian_q = self._compute_slopes()
        # Up-to-date Hessians need about two sweeps.
        self.wasted += max(sweep - 2, 0)
        # The effect of the last step on E is added to first order, which needs no further product with X.
        w, q = self.w - step, self.q + q_step
        value = self._value() - (q * slope_w).sum()
        # Recompute the Hessians once the wasted sweeps have cost as much.
        if 30 * folds * self.wasted > self.w[0].numel():
            self._compute_hessians()
        return w, q, value

    def _value(self) -> Tensor:
        """E without its terms in λ alone, if it is a loss on the rows of X; otherwise 0, which is not used."""
        return (
            torch.zeros(())
            if self.held_out is None
            else (self.held_out * self.loss.values(self.scores, self.rows.y)).sum()
        )

    def _compute_slopes(self) -> tuple[Tensor, Tensor, Tensor]:
        """The slopes of L and E, and H q, all without penalties, by one product with Xᵀ."""
        pulls = self.loss.slopes(self.scores, self.rows.y)
        hessian_q = self.weight[:, None] * self.loss.hessian_times(self.scores, self.rows.y, self.image)
        parts = [self.weight[:, None] * pulls, hessian_q]
        if self.held_out is not None:
            parts.append(self.held_out[:, None] * pulls)
        slope, hessian_q, *held_out = self.rows.model.transposed(torch.cat(parts), self.rows.X).split(len(self.w))
        self.slopes = slope, held_out[0] if held_out else self._outer_slope(), hessian_q
        return self.slopes

    def _outer_slope(self) -> Tensor:
        slope = self.process.outer_gradients((self.w, ()))[1][0]
        return torch.zeros_like(self.w) if slope is None else slope

    def _by_newton(self, start: tuple[Tensor, Tensor], tol: float) -> tuple[Tensor, Tensor, Tensor]:
        """w, q and E by Newton's method with a line search. The Hessians are then recomputed at w."""
        self.w, self.scores = start
        rows, factors = self.rows, factorised(self._stale_hessians())

        def solver(scores: Tensor) -> Any:
            return rows.conjugate_gradients(scores, lambda residual: solved(factors, residual))

        self.w, self.scores = minimise(rows, self.w, solver)
        _, outer, _ = self._compute_slopes()
        self.q = solver(self.scores)(outer, tol, None)
        self.image, self.slopes = rows.scores(self.q), None
        self._compute_hessians()
        return self.w, self.q, self._value()

    def _compute_hessians(self) -> None:
        mean = self.scores.mean(0, keepdim=True)
        members, cell = torch.unique(self.weight > 0, dim=1, return_inverse=True)
        self.hessians = CellHessians(self._cell_hessians(mean, cell), self._curvature(mean), members.to(mean))
        self.wasted = 0

    def _stale_hessians(self) -> Tensor:
        """The kept Hessians of each fold, scaled to the present mean curvature of its rows, with penalties."""
        there, here = self.hessians.curvature, self._curvature(self.scores)
        ratio = (self.weight * here).sum(1) / (self.weight * there).sum(1).clamp(min=1e-300)
        sums = torch.tensordot(self.hessians.members, self.hessians.matrices, 1)
        return self.rows.penalised(sums * ratio[:, None, None])

    def _curvature_column(self, scores: Tensor, a: int) -> Tensor:
        """Column a of the second derivative of the loss in the scores."""
        unit = scores.new_zeros(scores.shape[1], 1)
        unit[a] = 1
        return self.loss.hessian_times(scores, self.rows.y, unit.expand_as(scores))

    def _curvature(self, scores: Tensor) -> Tensor:
        """The curvature of the loss for every fold and row, summed over outputs."""
        return torch.stack([self._curvature_column(scores, a)[:, a] for a in range(scores.shape[1])]).sum(0)

    def _cell_hessians(self, scores: Tensor, cell: Tensor) -> Tensor:
        """The Hessian of the loss on the rows of every cell, at scores that all folds share."""
        (outputs, size), weight = self.w.shape[1:], self.weight.amax(0)
        cells = int(cell.max()) + 1
        found = scores.new_zeros(cells, outputs, size, outputs, size)
        for a in range(outputs):
            columns = weight * self._curvature_column(scores, a)[0]
            for b in range(a, outputs):
                for index in range(cells):
                    self._add_gram(found[index, a, :, b], (cell == index).nonzero()[:, 0], columns[b])
                found[:, b, :, a] = found[:, a, :, b]
        return found.reshape(cells, outputs * size, -1)

    def _add_gram(self, gram: Tensor, rows: Tensor, weight: Tensor) -> None:
        """Add Xᵀ diag(weight) X over some rows, block by block, which is cheaper than a weighted copy of all of X."""
        features = self.rows.X.shape[1]
        for some in torch.split(rows, BLOCK):
            block, part = self.rows.X[some], weight[some]
            if self.rows.model.intercept:
                sums = part @ block
                gram[features, :features] += sums
                gram[:features, features] += sums
                gram[features, features] += part.sum()
            gram[:features, :features] += block.mT @ block.mul(part[:, None])


def _error(slope: Tensor, step: Tensor, factors: Tensor, v: Tensor) -> float:
    """(stepᵀP step / vᵀP v)^½ of the worst fold, where step = P⁻¹ slope."""
    lengths = (v.reshape(len(v), 1, -1) @ factors).square().sum((1, 2)).clamp(min=1e-300)
    return float(((slope * step).sum((1, 2)) / lengths).clamp(min=0).sqrt().max())


def _held_out(process: Process) -> Tensor | None:
    """The held-out weights v / Σ v if E is a `HeldOutLoss` of the same models on the table of L; otherwise None."""
    outer, train, val = process.problem.outer, process.bound.task.train, process.bound.task.val
    if not isinstance(outer, HeldOutLoss) or outer.model != process.problem.inner or process.encoded:
        return None
    if _storage_key(train[0]) != _storage_key(val[0]) or _storage_key(train[1]) != _storage_key(val[1]):
        return None
    return val[2] / val[2].sum()


def _storage_key(tensor: Any) -> tuple[Any, ...]:
    """A key that changes if a tensor is replaced or changed in place."""
    return tensor.data_ptr(), tensor._version, tensor.shape, tensor.stride()


def _same_storage(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return len(one) == len(other) and all(_storage_key(a) == _storage_key(b) for a, b in zip(one, other, strict=True))
