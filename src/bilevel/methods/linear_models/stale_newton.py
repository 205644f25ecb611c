"""Linear models with a smooth loss, from few products with X and factors of Hessians that are kept.

The Hessian of fold k is Σ_c H_c + diag(α) over the cells c of rows that it trains on, and H_c = X_cᵀ D X_c changes
slowly with w. It is taken once for every cell and kept; at every λ it is scaled to the mean curvature of the rows of a
fold, and diag(α) is added. With P_k, the factors of that, w and the adjoint q of a fold are improved together,

    w ← w − P⁻¹∇L(w),   q ← q + P⁻¹(∇E(w) − H(w)q),

which costs one product with X and one with Xᵀ for both and for all folds. Where both were nearly solved for a
neighbouring λ, one or two such sweeps are enough. Their limit depends on H(w), which is exact, and not on P: an old P
costs sweeps and no accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bilevel.engine.method import Hypergradient
from bilevel.engine.process import Process
from bilevel.errors import BilevelError
from bilevel.methods.linear_models._at_minimiser import LinearModelMethod, Minimum, started
from bilevel.methods.linear_models.newton_linear import NewtonLinear, PenalisedRows, factorised, minimise, solved
from bilevel.structures.held_out import HeldOutLoss
from bilevel.structures.linear_models import LinearModels

SWEEPS = 12
# Rows of X that are weighted at once.
BLOCK = 2_000


@dataclass(frozen=True)
class StaleNewton(LinearModelMethod):
    """Newton steps with outdated Hessians, for `LinearModels` on a dense table.

    What is known at one λ, Hessians included, serves the next: it is in the result's `adjoint`, which `solve` passes on
    with `start="warm"`. Where the sweeps do not converge, Newton's method with a line search takes over. An outer
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
        sweeps = _Sweeps(process, started(process))
        w, q, value = sweeps.run(self.tol)
        direct = None
        if sweeps.share is None:
            value, _, direct, _ = process.outer_gradients((w, ()))
        kept = sweeps.known(w)
        return self.combined(process, w, q, value, direct, kept=kept, peak_memory=sweeps.hessians.matrices.nbytes)


@dataclass(frozen=True, eq=False)
class CellHessians:
    """Hessians of the loss on the rows of each cell, and each row's curvature, all at one point.

    Rows that every fold treats alike form a cell. `members` says which folds train on which cell.
    """

    matrices: Tensor
    curvature: Tensor
    members: Tensor


@dataclass(frozen=True, eq=False)
class KnownSweeps:
    """What one λ leaves for the next: w and q where the sweeps ended, their images under X, and Hessians.

    Attributes:
        reported: the w that was returned, which is one step ahead.
        slopes: Xᵀ times the slopes of L without penalties, of E, and H q without penalties, at w and q.
        wasted: sweeps that fresh Hessians would have saved.
        data: the tensors that all of this belongs to.
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
        # The weights of the rows that are held out, where E is known to be a loss on the rows of X.
        self.share = _held_out(process)
        self.data = (
            self.rows.X,
            self.rows.y,
            self.weight,
            *(() if self.share is None else [process.bound.task.val[2]]),
        )
        known: Any = process.adjoint
        if isinstance(known, KnownSweeps) and known.reported.equal(w) and _same(known.data, self.data):
            self.w, self.q, self.scores, self.image = known.w, known.q, known.scores, known.image
            self.slopes, self.hessians, self.wasted = known.slopes, known.hessians, known.wasted
        else:
            self.w, self.q = w, torch.zeros_like(w)
            self.scores = self.rows.scores(w)
            self.image, self.slopes = torch.zeros_like(self.scores), None
            self._take_hessians()

    def known(self, w: Tensor) -> KnownSweeps:
        slopes = None if self.share is None else self.slopes
        return KnownSweeps(w, self.w, self.q, self.scores, self.image, slopes, self.hessians, self.wasted, self.data)

    def run(self, tol: float) -> tuple[Tensor, Tensor, Tensor]:
        """w, q and E."""
        model, alpha, folds = self.rows.model, self.rows.alpha, len(self.w)
        start = self.w, self.scores
        slope, outer, bent = self.slopes or self._look()
        factors = factorised(self._stale_hessians())
        last = torch.inf
        for sweep in range(SWEEPS + 1):
            slope_w = slope + model.pulled(self.w, alpha)
            residual = outer - bent - model.pulled(self.q, alpha)
            step, turn = solved(factors, slope_w, residual)
            # Errors of w and q in the norm of the Hessian, relative to their own lengths.
            off = max(_error(slope_w, step, factors, self.w - step), _error(residual, turn, factors, self.q + turn))
            # The step that is known now will shrink them about as the last one did.
            if off * (min(off / last, 1.0) if sweep else 1.0) <= tol:
                break
            if sweep == SWEEPS or not off < 4 * last:
                return self._afresh(start, tol)
            last = off
            moved = self.rows.scores(torch.cat([-step, turn]))
            self.w, self.q = self.w - step, self.q + turn
            self.scores, self.image = self.scores + moved[:folds], self.image + moved[folds:]
            slope, outer, bent = self._look()
        # Take Hessians again, once the sweeps that better ones would have saved have cost as much.
        self.wasted += max(sweep - 2, 0)
        # What the last step would bring is known to first order, without another product.
        w, q = self.w - step, self.q + turn
        value = self._value() - (q * slope_w).sum()
        if 30 * folds * self.wasted > self.w[0].numel():
            self._take_hessians()
        return w, q, value

    def _value(self) -> Tensor:
        """E without what depends on λ alone, where it is a loss on the rows of X; unused otherwise."""
        return (
            torch.zeros(()) if self.share is None else (self.share * self.loss.values(self.scores, self.rows.y)).sum()
        )

    def _look(self) -> tuple[Tensor, Tensor, Tensor]:
        """The slopes of L and E, and H q, without penalties: one product with Xᵀ."""
        pulls = self.loss.slopes(self.scores, self.rows.y)
        bent = self.weight[:, None] * self.loss.hessian_times(self.scores, self.rows.y, self.image)
        parts = [self.weight[:, None] * pulls, bent]
        if self.share is not None:
            parts.append(self.share[:, None] * pulls)
        slope, bent, *held_out = self.rows.model.transposed(torch.cat(parts), self.rows.X).split(len(self.w))
        self.slopes = slope, held_out[0] if held_out else self._outer_slope(), bent
        return self.slopes

    def _outer_slope(self) -> Tensor:
        slope = self.process.outer_gradients((self.w, ()))[1][0]
        return torch.zeros_like(self.w) if slope is None else slope

    def _afresh(self, start: tuple[Tensor, Tensor], tol: float) -> tuple[Tensor, Tensor, Tensor]:
        """By Newton's method with a line search, and with Hessians of where that ends from then on."""
        self.w, self.scores = start
        rows, factors = self.rows, factorised(self._stale_hessians())

        def solver(scores: Tensor) -> Any:
            return rows.conjugate_gradients(scores, lambda residual: solved(factors, residual))

        self.w, self.scores = minimise(rows, self.w, solver)
        _, outer, _ = self._look()
        self.q = solver(self.scores)(outer, tol, None)
        self.image, self.slopes = rows.scores(self.q), None
        self._take_hessians()
        return self.w, self.q, self._value()

    def _take_hessians(self) -> None:
        mean = self.scores.mean(0, keepdim=True)
        members, cell = torch.unique(self.weight > 0, dim=1, return_inverse=True)
        self.hessians = CellHessians(self._cell_hessians(mean, cell), self._curvature(mean), members.to(mean))
        self.wasted = 0

    def _stale_hessians(self) -> Tensor:
        """Those that were taken, scaled to the mean curvature that the rows of a fold have now."""
        there, here = self.hessians.curvature, self._curvature(self.scores)
        ratio = (self.weight * here).sum(1) / (self.weight * there).sum(1).clamp(min=1e-300)
        sums = torch.tensordot(self.hessians.members, self.hessians.matrices, 1)
        return self.rows.penalised(sums * ratio[:, None, None])

    def _bends(self, scores: Tensor, a: int) -> Tensor:
        """Column a of the second derivative of the loss in the scores."""
        unit = scores.new_zeros(scores.shape[1], 1)
        unit[a] = 1
        return self.loss.hessian_times(scores, self.rows.y, unit.expand_as(scores))

    def _curvature(self, scores: Tensor) -> Tensor:
        """Of the loss for every fold and row, the sum over outputs."""
        return torch.stack([self._bends(scores, a)[:, a] for a in range(scores.shape[1])]).sum(0)

    def _cell_hessians(self, scores: Tensor, cell: Tensor) -> Tensor:
        """Of the loss on the rows of every cell, at the scores of one point for all folds."""
        (outputs, size), weight = self.w.shape[1:], self.weight.amax(0)
        cells = int(cell.max()) + 1
        found = scores.new_zeros(cells, outputs, size, outputs, size)
        for a in range(outputs):
            columns = weight * self._bends(scores, a)[0]
            for b in range(a, outputs):
                for index in range(cells):
                    self._add_gram(found[index, a, :, b], (cell == index).nonzero()[:, 0], columns[b])
                found[:, b, :, a] = found[:, a, :, b]
        return found.reshape(cells, outputs * size, -1)

    def _add_gram(self, gram: Tensor, rows: Tensor, weight: Tensor) -> None:
        """Xᵀ diag(weight) X over some rows, block by block: a weighted copy of all of X would cost more than this."""
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
    """v / Σ v, where E is a `HeldOutLoss` of the same models on the table of L."""
    outer, train, val = process.problem.outer, process.bound.task.train, process.bound.task.val
    if not isinstance(outer, HeldOutLoss) or outer.model != process.problem.inner or process.encoded:
        return None
    if _place(train[0]) != _place(val[0]) or _place(train[1]) != _place(val[1]):
        return None
    return val[2] / val[2].sum()


def _place(tensor: Any) -> tuple[Any, ...]:
    """Where a tensor's numbers are, and how often they were changed in place."""
    return tensor.data_ptr(), tensor._version, tensor.shape, tensor.stride()


def _same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return len(one) == len(other) and all(_place(a) == _place(b) for a, b in zip(one, other, strict=True))
