"""The outer level: minimise the criterion over the log penalties, and choose how freely they may differ."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy.optimize import minimize

from bilevel.errors import BilevelError, Outcome
from bilevel.estimators.criterion import EXACT, Criterion, Evaluation
from bilevel.estimators.folds import Array
from bilevel.estimators.hyperparameters import Grouping, tether

# From one penalty for all (∞) to penalties that hardly hold each other.
TETHERS = (math.inf, 3.0, 1.0, 0.5, 0.25, 0.1)
# What is taken where nothing is chosen: with this many rows for every penalty it hardly matters, and two folds leave
# nothing to train on once a third part is set aside.
UNCHOSEN = 1.0
PLENTY = 50
# The accuracy of hypergradients where points are only compared, not approached.
ROUGH = 0.03


@dataclass
class Record:
    """The history of all evaluations, shared by the stages of a descent."""

    report: Callable[[float], None] = field(default=lambda value: None)
    began: float = field(default_factory=time.perf_counter)
    rows: list[tuple[float, float, float]] = field(default_factory=list)

    def add(self, value: float, norm: float) -> None:
        self.rows.append((value, norm, time.perf_counter() - self.began))
        self.report(value)

    def arrays(self) -> dict[str, Array]:
        table = np.array(self.rows).reshape(-1, 3)
        return {"value": table[:, 0], "gradient_norm": table[:, 1], "seconds": table[:, 2]}


@dataclass(frozen=True)
class Descent:
    """Minimises f over λ by L-BFGS-B, from penalties that are all alike towards penalties that differ.

    Args:
        criterion: f as a function of every feature's log penalty.
        grouping: which of them are one hyperparameter.
        box: the range of λ, for each.
        max_iter: L-BFGS iterations for each tether.
        tol: stop where an iteration improves f by less than this, relatively.
        level: f where all penalties are equal and best, the unit of the tether.
    """

    criterion: Criterion
    grouping: Grouping
    box: tuple[float, float]
    max_iter: int
    tol: float
    level: float = 1.0

    @property
    def accuracy(self) -> float:
        """Of hypergradients. Errors of f are of the order of its square, and must not be mistaken for progress."""
        return max(min(0.3 * math.sqrt(self.tol), 1e-2), EXACT)

    def value(self, lam: Array) -> float:
        """f at λ, to about three digits."""
        return self._evaluate(lam, ROUGH).value

    def _evaluate(self, lam: Array, accuracy: float) -> Evaluation:
        return self.criterion.evaluate(self.grouping.spread(lam), accuracy)

    def shared(self, record: Record) -> tuple[Array, float]:
        """The best λ with all entries equal, and f there: a coarse grid, then descent from its best point."""
        grid = np.linspace(*self.box, 13)[1:-1]
        ones = np.ones(self.grouping.count)
        # From large penalties down: coefficients grow from nothing, and each fit starts the next.
        values = [self.value(t * ones) for t in grid[::-1]][::-1]
        if not np.isfinite(values).any():
            raise BilevelError(
                "The criterion is not finite for any penalty: the numbers of X or y are too large to be squared. Scale "
                "them first, with StandardScaler for example."
            )
        best = ones * grid[int(np.nanargmin(values))]
        lam, _ = self._minimise(best, math.inf, record)
        return lam, max(min(value for value, _, _ in record.rows), 1e-300)

    def path(self, start: Array, tethers: tuple[float, ...], record: Record) -> list[Array]:
        """λ for every tether, each begun where the one before it ended."""
        found: list[Array] = []
        for strength in tethers:
            begin = found[-1] if found else start
            found.append(self._minimise(begin, strength, record)[0])
        return found

    def finish(self, start: Array, strength: float, record: Record) -> tuple[Array, Outcome]:
        """λ at one tether, and how the search for it ended."""
        return self._minimise(start, strength, record)

    def _minimise(self, start: Array, strength: float, record: Record) -> tuple[Array, Outcome]:
        """λ that minimises f + strength·f₀/n·tether, by L-BFGS-B; an infinite strength keeps all entries equal."""
        tied = math.isinf(strength)
        if not tied:
            start = self._lifted(start)
        apart_weight = 0.0
        if not tied and strength > 0:
            apart_weight = strength * self.level / self.criterion.folds.total

        def objective(x: Array) -> tuple[float, Array]:
            lam = np.full(self.grouping.count, x[0]) if tied else x
            found = self._evaluate(lam, self.accuracy)
            slope = self.grouping.gather(found.gradient)
            if tied:
                slope = slope.sum(keepdims=True)
            record.add(found.value, float(np.linalg.norm(slope)))
            if apart_weight == 0:
                return found.value, slope
            apart, pull = tether(lam)
            return found.value + apart_weight * apart, slope + apart_weight * pull

        begin = start[:1] if tied else start
        first = objective(begin)
        # L-BFGS begins with the gradient itself as its step: in these units the log penalties move by about one each.
        unit = max(math.sqrt(len(begin)) / max(float(np.linalg.norm(first[1])), 1e-300), 1 / max(first[0], 1e-300))

        def scaled(x: Array) -> tuple[float, Array]:
            value, slope = first if np.array_equal(x, begin) else objective(x)
            return unit * value, unit * slope

        result = minimize(
            scaled,
            begin,
            jac=True,
            method="L-BFGS-B",
            bounds=[self.box] * len(begin),
            options={"maxiter": self.max_iter, "ftol": self.tol, "gtol": 0.0},
        )
        lam = np.full(self.grouping.count, result.x[0]) if tied else result.x
        return lam, _outcome(result, self.max_iter, self.tol)

    def _lifted(self, lam: Array) -> Array:
        """λ with all entries raised alike, as far as gradients grow and f hardly does.

        Where noise is small the best penalties are tiny, and there none makes a difference to f: gradients vanish, also
        those of features that should go. Higher up they do not.
        """
        here = self._evaluate(lam, ROUGH)
        limit = 1.02 * here.value
        while lam.max() + 2 < self.box[1]:
            above = self._evaluate(lam + 2, ROUGH)
            if above.value > limit or np.linalg.norm(above.gradient) <= np.linalg.norm(here.gradient):
                break
            lam, here = lam + 2, above
        return lam


def choose_tether(descent: Descent, start: Array, report: Callable[[], None]) -> float:
    """The tether with the least error in nested cross-validation.

    For each fold k, λ is tuned on the other folds with fold k's rows taken out, for every tether; fold k, trained with
    that λ, then judges it. What is judged never saw what judges it, but for the point where all searches begin: the
    shared penalty, which was found on all folds and is tuned again first.
    """
    criterion, errors = descent.criterion, np.full((descent.criterion.folds.count, len(TETHERS)), np.nan)
    for k in range(criterion.folds.count):
        rest = criterion.folds.without(k)
        if rest.count == 0:
            continue
        judge = criterion.restricted(criterion.folds.only(k))
        inner = replace(
            descent,
            criterion=criterion.restricted(rest),
            max_iter=min(descent.max_iter, 15),
            tol=max(descent.tol, 1e-3),
        )
        for index, lam in enumerate(inner.path(start, TETHERS, Record())):
            errors[k, index] = judge.evaluate(descent.grouping.spread(lam)).value * judge.folds.total
        report()
    errors = errors[~np.isnan(errors).any(1)]
    if len(errors) == 0:
        return UNCHOSEN
    worse = errors - errors[:, [int(np.argmin(errors.sum(0)))]]
    # Chance alone makes one of the freer tethers look best now and then. The tightest that is not clearly worse is
    # taken: within half a standard error of the paired differences.
    doubt = 0.5 * worse.std(0, ddof=1) * math.sqrt(len(worse)) if len(worse) > 1 else 0.0
    return TETHERS[int(np.argmax(worse.sum(0) <= doubt))]


def _outcome(result: Any, max_iter: int, tol: float) -> Outcome:
    if result.nit >= max_iter:
        return Outcome("finished", f"Ran all {max_iter} iterations; raise max_iter to go on.")
    count = f"{result.nit} iteration{'s' if result.nit != 1 else ''}"
    if not result.success:
        return Outcome("finished", f"Stopped after {count}: no step along the hypergradient improves the criterion.")
    return Outcome("converged", f"Converged after {count}: the criterion improves by less than {tol:g} of itself.")
