"""The algorithm `bilevel.SRBA` as a solver of benchopt."""

from __future__ import annotations

from typing import Any, ClassVar

import bilevel as bl
from referee.bridge import StochasticSolver


class Solver(StochasticSolver):
    """Computes the mean over all batches once per `period_frac` passes over the samples of both levels."""

    name = "bilevel SRBA"
    parameters: ClassVar[dict[str, Any]] = {**StochasticSolver.parameters, "period_frac": [0.5]}

    def algorithm(self, **step_sizes: Any) -> bl.Algorithm:
        return bl.SRBA(self.period(), **step_sizes)

    def period(self) -> int:
        samples = sum(len(batches) * batches.size for batches in (self.task.train, self.task.val))
        return max(2, int(samples * self.period_frac / self.batch_size))
