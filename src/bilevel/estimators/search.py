"""The outer problem: minimise the criterion over the log penalties, and choose the strength of the tether."""

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
from bilevel.methods.linear_models import LinearModelMethod, Minimum
from bilevel.outer_loop import Iteration, Solution, solve
from bilevel.problem import Task

# The strengths that are tried, from a shared penalty (∞) to almost independent penalties.
TETHERS = (math.inf, 3.0, 1.0, 0.5, 0.25, 0.1)
# The strength for tables that are too large for the Hessians that the choice needs.
DEFAULT_TETHER = 1.0
# With more effective penalties per row than this, the first-order estimate of `optimism` is not reliable.
MAX_PENALTIES_PER_ROW = 0.2
# A criterion is clearly worse than another if it is larger by this fraction.
CLEARLY_WORSE = 0.003
# The strongest tether within this number of standard errors of the best one is chosen.
STANDARD_ERRORS = 0.5
# Relative errors of hypergradients: for results, and where values of f are only compared.
EXACT, ROUGH = 1e-8, 0.03


@dataclass
class SearchRecord:
    """All evaluations of the criterion, in order: its value, the norm of its gradient, and the seconds."""

    report: Callable[[int, float], None] = lambda count, value: None
    started: float = field(default_factory=time.perf_counter)
    rows: list[tuple[float, float, float]] = field(default_factory=list)

    def add(self, value: float, norm: float) -> None:
        self.rows.append((value, norm, time.perf_counter() - self.started))
        self.report(len(self.rows), value)

    def arrays(self) -> dict[str, Array]:
        table = np.array(self.rows).reshape(-1, 3)
        return {"value": table[:, 0], "gradient_norm": table[:, 1], "seconds": table[:, 2]}


class PenaltySearch:
    """Minimises f over λ by L-BFGS-B, first with a shared penalty, then with different ones.

    Args:
        table: the table as a bilevel problem.
        folds: its folds.
        count: the number of penalties.
        box: the range of each log penalty.
        max_iter: L-BFGS iterations for each tether.
        tol: stop when an iteration improves f by less than this, relatively.
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
        # f at the best shared penalty, which is the unit of the tether.
        self.shared_value = 1.0
        self.w = table.start(self.task)
        self.last: Hypergradient | None = None

    def on_folds(self, folds: Folds) -> PenaltySearch:
        """A search on other folds of the same table. It starts from the mean of the coefficients of these folds."""
        other = PenaltySearch(self.table, folds, self.count, self.box, self.max_iter, self.tol)
        other.shared_value = self.shared_value
        other.w = self.w.mean(0).expand_as(other.w)
        return other

    @property
    def accuracy(self) -> float:
        """The relative error of hypergradients. Its square, the error of f, must be below the smallest improvement."""
        return max(min(0.3 * math.sqrt(self.tol), 1e-2), EXACT)

    def evaluate(self, lam: Tensor, tol: float = EXACT) -> Hypergradient:
        """f and its gradient at λ. The next evaluation starts from its coefficients."""
        result = hypergradient(
            self.table.problem,
            lam,
            self.task,
            method=self.table.method(tol),
            start=self.w,
            adjoint=None if self.last is None else self.last.adjoint,
            **self.settings,
        )
        self.w, self.last = result.inner, result
        return result

    def value(self, lam: Tensor) -> float:
        """f at λ, to about three digits."""
        return float(self.evaluate(lam, ROUGH).value)

    def shared(self, record: SearchRecord) -> tuple[Tensor, float, Outcome]:
        """The best λ with equal entries, f there, and the outcome: a grid, then descent from its best point."""
        grid = torch.linspace(*self.box, 61, dtype=torch.float64)[1:-1]
        values = self.table.shared_values(grid, self.task)
        if values is None:
            # From large penalties to small ones. Each fit starts from the one before.
            grid, values = grid[4::5].flip(0), []
            for log_penalty in grid:
                values.append(self._value_or_infinity(log_penalty[None]))
                if values[-1] > self.table.stopping_rise * min(values):
                    break
        if not np.isfinite(values).any():
            raise BilevelError(
                "The criterion is not finite for any penalty: squares of the numbers in X or y overflow. Scale them "
                "first, for example with StandardScaler."
            )
        lam, outcome = self.minimise(grid[int(np.nanargmin(values))].expand(self.count), math.inf, record)
        return lam, max(min(value for value, _, _ in record.rows), 1e-300), outcome

    def _value_or_infinity(self, lam: Tensor) -> float:
        try:
            return self.value(lam)
        except DivergenceError:
            return math.inf

    def minimise(self, start: Tensor, strength: float, record: SearchRecord | None = None) -> tuple[Tensor, Outcome]:
        """The λ that minimises f + strength·f₀/n·tether, and the outcome. A strength of ∞ keeps all entries equal."""
        tied = math.isinf(strength)
        tether_weight = 0.0 if tied or self.count == 1 else strength * self.shared_value / self.folds.total
        weight = torch.tensor(tether_weight, dtype=torch.float64)
        task = Task(self.task.train, (*self.task.val[:-1], weight))
        raised, limit = None, math.inf

        def observe(here: Iteration) -> bool | None:
            nonlocal raised, limit
            if here.k and record is None:
                return None
            value, slope = here.hypergradient.value, here.hypergradient.grad
            if tether_weight > 0:
                penalty, pullback = Tether().linearised(here.lam, weight)
                value, slope = value - penalty, slope - pullback(1.0)
            if here.k == 0 and not tied:
                limit = min(limit, 1.02 * float(value))
                raised = self._raised(here.lam, limit, float(slope.norm()))
                if raised is not None:
                    return True
            if record is not None:
                record.add(float(value), float(slope.norm()))
            return None

        def run(first: Tensor) -> Solution:
            return solve(
                self.table.problem,
                first,
                task,
                method=self.table.method(self.accuracy),
                algorithm=LBFGSB(max_iter=self.max_iter, tol=self.tol),
                constraint=self.constraint,
                iterations=10**9,
                start=self.w,
                callbacks=[observe],
                progress=False,
                **self.settings,
            )

        solution = run(start[:1] if tied else start)
        while raised is not None:
            solution = run(raised)
        self.w = solution.inner
        return solution.outer.expand(self.count) if tied else solution.outer, solution.outcome

    def corrected(self, lam: Tensor, strength: float) -> tuple[Array, Array, float]:
        """The loss of every held-out row if it is left out of the tuning too, its weight, and the effective number of
        penalties.

        Args:
            strength: the tether at which λ was tuned; inf for a shared penalty.
        """
        self.evaluate(lam)
        with torch.no_grad():
            rows = self.table.held_out(self.minimum(lam), self.folds, lam)
            if math.isinf(strength) or self.count == 1:
                rows, tether = rows.with_shared_penalty(), torch.zeros(1, dtype=lam.dtype)
            else:
                tether = 2 * strength * self.shared_value / torch.cosh(lam - lam.mean()).square()
            losses, count = corrected_losses(rows, self.table.loss, tether, mean=not math.isinf(strength))
        return losses.numpy(), rows.weight.numpy(), count

    def minimum(self, lam: Tensor) -> Minimum:
        """The inner minimisers at λ, with their inverse Hessians. Starts from the last evaluation."""
        method = self.table.method(EXACT)
        assert isinstance(method, LinearModelMethod)
        process = Process(self.table.problem, lam, self.task, self.settings["dynamics"], 0, self.w)
        with torch.no_grad():
            return method.minimum(process)

    def _raised(self, lam: Tensor, limit: float, norm: float) -> Tensor | None:
        """λ + 2 if f is at most `limit` there and the norm of its gradient is larger than `norm`; otherwise None.

        With little noise the best shared penalty is tiny. There f hardly depends on any penalty, and the gradient is
        almost zero even for features that should be removed. At larger penalties it is not.
        """
        if float(lam.max()) + 2 >= self.box[1]:
            return None
        result = self.evaluate(lam + 2, ROUGH)
        return lam + 2 if float(result.value) <= limit and float(result.grad.norm()) > norm else None


def choose_tether(search: PenaltySearch, start: Tensor, record: SearchRecord | None = None) -> tuple[float, Tensor]:
    """The tether with the least criterion if every row is left out of the tuning too, and its λ.

    The estimate needs no additional split: see `optimism`. A weak tether may look best by chance. So the strongest one
    is chosen that is within half a standard error of the best, by paired differences. A shared penalty is kept unless
    the others are better by `FoldedTable.min_standard_errors`.
    """
    lams: list[Tensor] = []
    errors: list[Array] = []
    lam = start
    weight = np.zeros(0)
    for strength in TETHERS:
        if math.isfinite(strength):
            lam, _ = search.minimise(lam, strength, record)
        losses, weight, count = search.corrected(lam, strength)
        reliable = count <= MAX_PENALTIES_PER_ROW * len(losses)
        # The shared penalty, which comes first, is always a candidate.
        if reliable or not errors:
            lams.append(lam)
            errors.append(losses)
        if not reliable:
            break
        # Stop when two strengths in a row were clearly worse.
        if len(errors) > 2 and all(weight @ errors[k] > (1 + CLEARLY_WORSE) * (weight @ errors[-3]) for k in (-1, -2)):
            break
    best = errors[int(np.argmin([weight @ error for error in errors]))]
    distances = [_standard_errors(error, best, weight) for error in errors]
    near_best = (k for k, distance in enumerate(distances) if distance <= STANDARD_ERRORS)
    chosen = 0 if distances[0] <= search.table.min_standard_errors else next(near_best)
    return TETHERS[chosen], lams[chosen]


def _standard_errors(errors: Array, best: Array, weight: Array) -> float:
    """The mean of `errors` − `best`, in standard errors of this paired difference."""
    difference, total = errors - best, float(weight.sum())
    mean = float(weight @ difference) / total
    standard_error = math.sqrt(float(weight @ (difference - mean) ** 2) / max(total - 1, 1e-300) / total)
    return mean / standard_error if standard_error > 0 else math.copysign(math.inf, mean) if mean else 0.0
