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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from bilevel.engine.method import Hypergradient
from bilevel.engine.process import Process
from bilevel.errors import BilevelError
from bilevel.methods.linear_models._at_minimiser import LinearModelMethod, Minimum, same_storage, start_of, storage_key
from bilevel.methods.linear_models._shared_work import Parts, fold_parts, row_blocks, shared
from bilevel.methods.linear_models.newton_linear import NewtonLinear, PenalisedRows, factorised, minimise, solved
from bilevel.structures.data_checks import computes_as
from bilevel.structures.linear_models import LinearModels
from bilevel.structures.outer_objectives import HeldOutLoss

SWEEPS = 12
# Rows of X that are weighted at once.
BLOCK = 2_000
# Up to this number of folds, the set of folds that train on a row is an integer that float64 holds exactly.
MAX_CODED_FOLDS = 52

# For each block of rows that this process works on: x_i w_k and x_i q_k, folds × outputs × rows.
Images: TypeAlias = dict[int, tuple[Tensor, Tensor]]


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
        images: for each block of rows of this process, the images of w and q under X.
        slopes: Xᵀ times the slopes of L without penalties, of E, and H q without penalties, at w and q.
        wasted: the number of sweeps that up-to-date Hessians would have saved.
        data: the tensors from which all of this was computed.
    """

    reported: Tensor
    w: Tensor
    q: Tensor
    images: Images
    slopes: tuple[Tensor, Tensor, Tensor] | None
    hessians: CellHessians
    wasted: int
    data: tuple[Tensor, ...]


class _Sweeps:
    """The sweeps at one λ.

    Blocks of rows, the cells' Hessians and the folds' linear systems are divided among the processes that share the
    work. Each process has the images under X of its own blocks of rows only.
    """

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
        rows, size = len(self.rows.X), w[0].numel()
        # A sweep multiplies five vectors of every fold with X or its transpose.
        self.blocks = row_blocks(rows, 10 * rows * w.numel())
        # The factors of one λ serve several sweeps.
        self.folds = fold_parts(len(w), len(w) * size**3 / 6)
        self.images: Images = {}
        saved: Any = process.adjoint
        if isinstance(saved, SweepState) and saved.reported.equal(w) and same_storage(saved.data, self.data):
            self.w, self.q, self.images = saved.w, saved.q, saved.images
            self.slopes, self.hessians, self.wasted = saved.slopes, saved.hessians, saved.wasted
        else:
            self.w, self.q, self.slopes = w, torch.zeros_like(w), None
            self._compute_hessians()

    def saved(self, w: Tensor) -> SweepState:
        slopes = None if self.held_out is None else self.slopes
        return SweepState(w, self.w, self.q, self.images, slopes, self.hessians, self.wasted, self.data)

    def run(self, tol: float) -> tuple[Tensor, Tensor, Tensor]:
        """w, q and E."""
        model, alpha, folds = self.rows.model, self.rows.alpha, len(self.w)
        slope, outer, hessian_q = self.slopes or self._compute_slopes()
        start, systems = (self.w, self.images), self._systems()
        last = torch.inf
        for sweep in range(SWEEPS + 1):
            slope_w = slope + model.pulled(self.w, alpha)
            residual = outer - hessian_q - model.pulled(self.q, alpha)
            step, q_step, error = systems.steps(slope_w, residual, self.w, self.q)
            # The step just computed is expected to reduce the errors by the same factor as the last one.
            if error * (min(error / last, 1.0) if sweep else 1.0) <= tol:
                break
            if sweep == SWEEPS or not error < 4 * last:
                return self._by_newton(start, tol)
            last = error
            self.w, self.q = self.w - step, self.q + q_step
            slope, outer, hessian_q = self._compute_slopes(torch.cat([-step, q_step]))
        # Up-to-date Hessians need about two sweeps.
        self.wasted += max(sweep - 2, 0)
        # The effect of the last step on E is added to first order, which needs no further product with X.
        w, q = self.w - step, self.q + q_step
        value = self._value() - (q * slope_w).sum()
        # Recompute the Hessians once the wasted sweeps have cost as much.
        if 30 * folds * self.wasted > self.w[0].numel():
            self._compute_hessians()
        return w, q, value

    def _image(self, block: int) -> tuple[Tensor, Tensor]:
        """The images of w and q under X in a block of rows."""
        if block not in self.images:
            X = self.rows.X[self.blocks.slices[block]]
            scores = self.rows.model.scores(self.w, X)
            image = self.rows.model.scores(self.q, X) if bool(self.q.any()) else torch.zeros_like(scores)
            self.images[block] = scores, image
        return self.images[block]

    def _value(self) -> Tensor:
        """E without its terms in λ alone, if it is a loss on the rows of X; otherwise 0, which is not used."""
        held_out = self.held_out
        if held_out is None:
            return self.w.new_zeros(())

        def value(block: int) -> Tensor:
            rows = self.blocks.slices[block]
            return (held_out[:, rows] * self.loss.values(self._image(block)[0], self.rows.y[:, rows])).sum()

        return self.blocks.sum(value, self.w.new_empty(()))

    def _compute_slopes(self, moves: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The slopes of L and E, and H q, all without penalties, by one product with Xᵀ.

        Args:
            moves: by how much w and q have changed since the images were computed, one after the other.
        """
        folds, before, self.images = len(self.w), self.images, {}

        def slopes(block: int) -> Tensor:
            rows = self.blocks.slices[block]
            X, y, weight = self.rows.X[rows], self.rows.y[:, rows], self.weight[:, None, rows]
            if block in before:
                self.images[block] = before[block]
            if block in before and moves is not None:
                (scores, image), moved = before[block], self.rows.model.scores(moves, X)
                self.images[block] = scores + moved[:folds], image + moved[folds:]
            scores, image = self._image(block)
            pulls = self.loss.slopes(scores, y)
            parts = [weight * pulls, weight * self.loss.hessian_times(scores, y, image)]
            if self.held_out is not None:
                parts.append(self.held_out[:, None, rows] * pulls)
            return self.rows.model.transposed(torch.cat(parts), X)

        count = 2 if self.held_out is None else 3
        found = self.blocks.sum(slopes, self.w.new_empty(count * folds, *self.w.shape[1:]))
        slope, hessian_q, *held_out = torch.split(found, folds)
        self.slopes = slope, held_out[0] if held_out else self._outer_slope(), hessian_q
        return self.slopes

    def _outer_slope(self) -> Tensor:
        slope = self.process.outer_gradients((self.w, ()))[1][0]
        return torch.zeros_like(self.w) if slope is None else slope

    def _by_newton(self, start: tuple[Tensor, Images], tol: float) -> tuple[Tensor, Tensor, Tensor]:
        """w, q and E by Newton's method with a line search. The Hessians are then recomputed at w."""
        self.w, self.images = start
        rows, systems = self.rows, self._systems()

        def solver(scores: Tensor) -> Any:
            return rows.conjugate_gradients(scores, systems.solve)

        def images(*whole: Tensor) -> Images:
            return {block: (whole[0][..., s], whole[1][..., s]) for block, s in enumerate(self.blocks.slices)}

        self.w, scores = minimise(rows, self.w, solver)
        self.images = images(scores, torch.zeros_like(scores))
        _, outer, _ = self._compute_slopes()
        self.q = solver(scores)(outer, tol, None)
        self.images, self.slopes = images(scores, rows.scores(self.q)), None
        self._compute_hessians()
        return self.w, self.q, self._value()

    def _compute_hessians(self) -> None:
        """Compute the Hessians at the mean of the folds' scores."""
        slices, total = self.blocks.slices, len(self.rows.X)

        def mean(block: int) -> Tensor:
            found = self._image(block)[0].mean(0, keepdim=True)
            return torch.nn.functional.pad(found, (0, slices[0].stop - found.shape[-1]))

        means = self.blocks.each(mean, self.w.new_empty(1, self.w.shape[1], slices[0].stop))
        scores = torch.cat(means, -1)[..., :total]
        members, cell = _cells(self.weight > 0)
        self.hessians = CellHessians(self._cell_hessians(scores, cell), self._curvature(scores), members.to(scores))
        self.wasted = 0

    def _systems(self) -> _Systems:
        """The linear systems with the kept Hessians of each fold, scaled to the present mean curvature of its rows."""

        def curvature(block: int) -> Tensor:
            here = self._curvature(self._image(block)[0], self.blocks.slices[block])
            return (self.weight[:, self.blocks.slices[block]] * here).sum(1)

        there = (self.weight * self.hessians.curvature).sum(1).clamp(min=1e-300)
        ratio = self.blocks.sum(curvature, self.w.new_empty(len(self.w))) / there

        def matrices(folds: slice) -> Tensor:
            sums = torch.tensordot(self.hessians.members[folds], self.hessians.matrices, 1)
            return self.rows.penalised(sums * ratio[folds, None, None])

        return _Systems(self.folds, matrices)

    def _curvature(self, scores: Tensor, rows: slice = slice(None)) -> Tensor:
        """The curvature of the loss for every fold and row, summed over outputs."""
        y, outputs = self.rows.y[:, rows], range(scores.shape[1])
        return torch.stack([self.loss.hessian_column(scores, y, a)[:, a] for a in outputs]).sum(0)

    def _cell_hessians(self, scores: Tensor, cell: Tensor) -> Tensor:
        """The Hessian of the loss on the rows of every cell, at scores that all folds share."""
        (outputs, size), weight = self.w.shape[1:], self.weight.amax(0)
        columns = [weight * self.loss.hessian_column(scores, self.rows.y, a)[0] for a in range(outputs)]

        def hessian(index: int) -> Tensor:
            found, members = scores.new_zeros(outputs, size, outputs, size), (cell == index).nonzero()[:, 0]
            for a in range(outputs):
                for b in range(a, outputs):
                    self._add_gram(found[a, :, b], members, columns[a][b])
                    found[b, :, a] = found[a, :, b]
            return found.reshape(outputs * size, -1)

        like = scores.new_empty(outputs * size, outputs * size)
        return torch.stack(shared(hessian, int(cell.max()) + 1, like))

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


class _Systems:
    """Systems with one matrix P_k for every fold, each factorised when it is first needed."""

    def __init__(self, folds: Parts, matrices: Callable[[slice], Tensor]) -> None:
        self.folds, self.matrices = folds, matrices
        self.found: dict[int, Tensor] = {}

    def _factors(self, part: int) -> Tensor:
        if part not in self.found:
            self.found[part] = factorised(self.matrices(self.folds.slices[part]))
        return self.found[part]

    def solve(self, right: Tensor) -> Tensor:
        """P_k⁻¹ b_k for every fold."""
        return self.folds.joined(
            lambda part: solved(self._factors(part), right[self.folds.slices[part]]), torch.empty_like(right)
        )

    def steps(self, slope: Tensor, residual: Tensor, w: Tensor, q: Tensor) -> tuple[Tensor, Tensor, float]:
        """P⁻¹ slope, P⁻¹ residual, and the error of w and q in the norm of P, relative to their own lengths."""

        def step(part: int) -> Tensor:
            here, factors = self.folds.slices[part], self._factors(part)
            step, q_step = solved(factors, torch.stack([slope[here], residual[here]], 1)).unbind(1)
            errors = (
                _errors(slope[here], step, factors, w[here] - step),
                _errors(residual[here], q_step, factors, q[here] + q_step),
            )
            return torch.cat([step.flatten(1), q_step.flatten(1), torch.stack(errors, 1)], 1)

        size = w[0].numel()
        found = self.folds.joined(step, w.new_empty(len(w), 2 * size + 2))
        steps = found[:, : 2 * size].reshape(len(w), 2, *w.shape[1:])
        return steps[:, 0], steps[:, 1], float(found[:, 2 * size :].max())


def _errors(slope: Tensor, step: Tensor, factors: Tensor, v: Tensor) -> Tensor:
    """(stepᵀP step / vᵀP v)^½ of every fold, where step = P⁻¹ slope."""
    lengths = (v.reshape(len(v), 1, -1) @ factors).square().sum((1, 2)).clamp(min=1e-300)
    return ((slope * step).sum((1, 2)) / lengths).clamp(min=0).sqrt()


def _cells(trains: Tensor) -> tuple[Tensor, Tensor]:
    """Which folds train on each cell of rows, folds × cells, and the cell of every row."""
    folds = len(trains)
    if folds > MAX_CODED_FOLDS:
        found: tuple[Tensor, Tensor] = torch.unique(trains, dim=1, return_inverse=True)
        return found
    # The same cells in the same order. Sorting one number for every row is fifty times faster than sorting columns.
    digits = torch.exp2(torch.arange(folds - 1, -1, -1, dtype=torch.float64, device=trains.device))
    codes, cell = torch.unique(digits @ trains.double(), return_inverse=True)
    return (codes / digits[:, None]).floor().fmod(2) > 0, cell


def _held_out(process: Process) -> Tensor | None:
    """The held-out weights v / Σ v if E is a `HeldOutLoss` of the same models on the table of L; otherwise None."""
    outer, train, val = process.problem.outer, process.bound.task.train, process.bound.task.val
    if not computes_as(outer, HeldOutLoss) or outer.model != process.problem.inner or process.encoded:
        return None
    if storage_key(train[0]) != storage_key(val[0]) or storage_key(train[1]) != storage_key(val[1]):
        return None
    return val[2] / val[2].sum()
