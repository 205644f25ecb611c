"""The algorithm `bilevel.MRBO` as a solver of benchopt."""

from __future__ import annotations

from typing import Any, ClassVar

import bilevel as bl
from referee.bridge import StochasticSolver


class Solver(StochasticSolver):
    """Step sizes fall like k^−1/3."""

    name = "bilevel MRBO"
    parameters: ClassVar[dict[str, Any]] = {**StochasticSolver.parameters, "n_shia_steps": [10], "eta": [0.5]}
    exponents: ClassVar[tuple[float, float]] = (1 / 3, 1 / 3)

    def algorithm(self, **step_sizes: Any) -> bl.Algorithm:
        return bl.MRBO(self.n_shia_steps, self.eta, **step_sizes)
