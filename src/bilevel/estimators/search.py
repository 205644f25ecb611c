"""The outer level: minimise the criterion over the log penalties, and choose how freely they may differ."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bilevel.algorithms.lbfgsb import LBFGSB
from bilevel.constraints.box import Box
from bilevel.engine.method import Hypergradient
from bilevel.engine.process import Process
from bilevel.errors import BilevelError, DivergenceError, Outcome
from bilevel.estimators.folds import Array, Folds
from bilevel.estimators.hyperparameters import Tether
from bilevel.estimators.optimism import corrected_losses
from bilevel.estimators.tables import FoldedTable
from bilevel.hypergradients import hypergradient
from bilevel.methods.linear_models._at_minimiser import LinearModelMethod, Minimum
from bilevel.outer_loop import Iteration, Solution, solve
from bilevel.problem import Task

# From one penalty for all (∞) to penalties that hardly hold each other.
TETHERS = (math.inf, 3.0, 1.0, 0.5, 0.25, 0.1)
# The strength that is used where the table is too large for the Hessians that a choice needs.
UNCHOSEN = 1.0
# The effective number of penalties for every row beyond which the first order says little about leaving out a row.
FEW = 0.2
# By how much a criterion is clearly worse, relatively.
CLEARLY = 0.003
# How many standard errors a tether may be behind the best one.
DOUBT = 0.5
# Relative errors of hypergradients: as good as none; and where points are only compared, not approached.
EXACT, ROUGH = 1e-8, 0.03


@dataclass
class SearchRecord:
    """All evaluations of the criterion on all folds, in order: its value, the norm of its gradient, and the time."""

    report: Callable[[int, float], None] = lambda count, value: None
    began: float = field(default_factory=time.perf_counter)
    rows: list[tuple[float, float, float]] = field(default_factory=list)

    def add(self, value: float, norm: float) -> None:
        self.rows.append((value, norm, time.perf_counter() - self.began))
        self.report(len(self.rows), value)

    def arrays(self) -> dict[str, Array]:
        table = np.array(self.rows).reshape(-1, 3)
        return {"value": table[:, 0], "gradient_norm": table[:, 1], "seconds": table[:, 2]}


class PenaltySearch:
    """Minimises f over λ by L-BFGS-B, from penalties that are all alike towards penalties that differ.

    Args:
        table: the rows, and the bilevel problem that they give.
        folds: which of them each fold trains on and is judged on.
        count: the number of penalties.
        box: the range of each log penalty.
        max_iter: L-BFGS iterations for each tether.
        tol: stop where an iteration improves f by less than this, relatively.
    """

    def __init__(
        self,
        table: FoldedTable,
        folds: Folds,
        count: int,
        box: tuple[float, float],
        max_iter: int,
        tol: float,
    ) -> None:
        self.table, self.folds, self.count, self.box = table, folds, count, box
        self.max_iter, self.tol = max_iter, tol
        self.task, self.constraint = table.task(folds), Box(*box)
        self.settings: dict[str, Any] = {"dynamics": table.dynamics(self.task), "steps": 0}
        # f where all penalties are equal and best, the unit of the tether.
        self.level = 1.0
        self.w = table.start(self.task)
        self.known: Hypergradient | None = None

    def on(self, folds: Folds, max_iter: int, tol: float) -> PenaltySearch:
        """The search on other folds of the same rows. Folds of almost the same rows have almost the same minimisers."""
        other = PenaltySearch(self.table, folds, self.count, self.box, max_iter, tol)
        other.level = self.level
        other.w = self.w.mean(0).expand_as(other.w)
        return other

    @property
    def accuracy(self) -> float:
        """Of hypergradients. Errors of f are of the order of its square, and must not be mistaken for progress."""
        return max(min(0.3 * math.sqrt(self.tol), 1e-2), EXACT)

    def evaluate(self, lam: Tensor, tol: float = EXACT) -> Hypergradient:
        """f and its gradient at λ; the coefficients that were found start the next evaluation."""
        found = hypergradient(
            self.table.problem,
            lam,
            self.task,
            method=self.table.method(tol),
            start=self.w,
            adjoint=None if self.known is None else self.known.adjoint,
            **self.settings,
        )
        self.w, self.known = found.inner, found
        return found

    def value(self, lam: Tensor) -> float:
        """f at λ, to about three digits."""
        return float(self.evaluate(lam, ROUGH).value)

    def shared(self, record: SearchRecord) -> tuple[Tensor, float, Outcome]:
        """The best λ with all entries equal, f there and how that ended: a grid, then descent from its best point."""
        grid = torch.linspace(*self.box, 61, dtype=torch.float64)[1:-1]
        values = self.table.shared_values(grid, self.task)
        if values is None:
            # From large penalties down: coefficients grow from nothing, and each fit starts the next.
            grid, values = grid[4::5].flip(0), []
            for level in grid:
                values.append(self._value_or_infinity(level[None]))
                if values[-1] > self.table.rise * min(values):
                    break
        if not np.isfinite(values).any():
            raise BilevelError(
                "The criterion is not finite for any penalty: the numbers of X or y are too large to be squared. Scale "
                "them first, with StandardScaler for example."
            )
        lam, outcome = self.minimise(grid[int(np.nanargmin(values))].expand(self.count), math.inf, record)
        return lam, max(min(value for value, _, _ in record.rows), 1e-300), outcome

    def _value_or_infinity(self, lam: Tensor) -> float:
        try:
            return self.value(lam)
        except DivergenceError:
            return math.inf

    def path(self, start: Tensor, tethers: tuple[float, ...], record: SearchRecord | None = None) -> list[Tensor]:
        """λ for every tether, each begun where the one before it ended."""
        found: list[Tensor] = []
        for strength in tethers:
            found.append(self.minimise(found[-1] if found else start, strength, record)[0])
        return found

    def minimise(self, start: Tensor, strength: float, record: SearchRecord | None = None) -> tuple[Tensor, Outcome]:
        """λ that minimises f + strength·f₀/n·tether, and how the search ended; ∞ keeps all entries equal."""
        tied = math.isinf(strength)
        held = 0.0 if tied or self.count == 1 else strength * self.level / self.folds.total
        weight = torch.tensor(held, dtype=torch.float64)
        task = Task(self.task.train, (*self.task.val[:-1], weight))
        lifted, limit = None, math.inf

        def note(here: Iteration) -> bool | None:
            nonlocal lifted, limit
            if here.k and record is None:
                return None
            value, slope = here.hypergradient.value, here.hypergradient.grad
            if held > 0:
                apart, pullback = Tether().linearised(here.lam, weight)
                value, slope = value - apart, slope - pullback(1.0)
            if here.k == 0 and not tied:
                limit = min(limit, 1.02 * float(value))
                lifted = self._lifted(here.lam, limit, float(slope.norm()))
                if lifted is not None:
                    return True
            if record is not None:
                record.add(float(value), float(slope.norm()))
            return None

        def run(begin: Tensor) -> Solution:
            return solve(
                self.table.problem,
                begin,
                task,
                method=self.table.method(self.accuracy),
                algorithm=LBFGSB(max_iter=self.max_iter, tol=self.tol),
                constraint=self.constraint,
                iterations=10**9,
                start=self.w,
                callbacks=[note],
                progress=False,
                **self.settings,
            )

        found = run(start[:1] if tied else start)
        while lifted is not None:
            found = run(lifted)
        self.w = found.inner
        return found.outer.expand(self.count) if tied else found.outer, found.outcome

    def corrected(self, lam: Tensor, strength: float) -> tuple[Array, Array, float]:
        """The losses of the rows, each left out of the tuning too; their weights; the effective number of penalties.

        Args:
            strength: the tether that λ was found with; inf for one penalty.
        """
        self.evaluate(lam)
        with torch.no_grad():
            held = self.table.held_out(self.minimum(lam), self.folds, lam)
            if math.isinf(strength) or self.count == 1:
                held, tether = held.tied(), torch.zeros(1, dtype=lam.dtype)
            else:
                tether = 2 * strength * self.level / torch.cosh(lam - lam.mean()).square()
            losses, count = corrected_losses(held, self.table.loss, tether, mean=not math.isinf(strength))
        return losses.numpy(), held.weight.numpy(), count

    def minimum(self, lam: Tensor) -> Minimum:
        """The minimisers at λ with products with their inverse Hessians, from where the last evaluation ended."""
        method = self.table.method(EXACT)
        assert isinstance(method, LinearModelMethod)
        process = Process(self.table.problem, lam, self.task, self.settings["dynamics"], 0, self.w)
        with torch.no_grad():
            return method.minimum(process)

    def _lifted(self, lam: Tensor, limit: float, norm: float) -> Tensor | None:
        """λ with all entries raised by 2, if f is at most `limit` there and its gradient longer than `norm`.

        Where noise is small the best penalties are tiny, and there none makes a difference to f: gradients vanish, also
        those of features that should go. Higher up they do not.
        """
        if float(lam.max()) + 2 >= self.box[1]:
            return None
        above = self.evaluate(lam + 2, ROUGH)
        return lam + 2 if float(above.value) <= limit and float(above.grad.norm()) > norm else None


def choose_tether(search: PenaltySearch, start: Tensor, record: SearchRecord | None = None) -> tuple[float, Tensor]:
    """The tether with the least criterion once every row is left out of the tuning, too; and its λ.

    No rows are set aside and nothing is drawn at random: see `optimism`. Chance alone makes one of the freer tethers
    look best now and then. The tightest that is not clearly worse is taken: within half a standard error of the paired
    differences. Whether penalties differ at all may need more evidence (`FoldedTable.doubt`).
    """
    lams, errors, lam = [], [], start
    weight = np.zeros(0)
    for strength in TETHERS:
        if math.isfinite(strength):
            lam, _ = search.minimise(lam, strength, record)
        losses, weight, count = search.corrected(lam, strength)
        if count > FEW * len(losses):
            break
        lams.append(lam)
        errors.append(losses)
        # Freer penalties than those that were clearly worse twice are not tried.
        if len(errors) > 2 and all(weight @ errors[k] > (1 + CLEARLY) * (weight @ errors[-3]) for k in (-1, -2)):
            break
    best = errors[int(np.argmin([weight @ error for error in errors]))]
    leads = [_lead(error, best, weight) for error in errors]
    at = 0 if leads[0] <= search.table.doubt else next(k for k, lead in enumerate(leads) if lead <= DOUBT)
    return TETHERS[at], lams[at]


def _lead(errors: Array, best: Array, weight: Array) -> float:
    """By how many standard errors of their paired differences some rows' errors are higher than others'."""
    worse, total = errors - best, float(weight.sum())
    mean = float(weight @ worse) / total
    spread = math.sqrt(float(weight @ (worse - mean) ** 2) / max(total - 1, 1e-300) / total)
    return mean / spread if spread > 0 else math.copysign(math.inf, mean) if mean else 0.0
