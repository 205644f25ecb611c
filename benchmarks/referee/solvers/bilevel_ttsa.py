"""The algorithm `bilevel.TTSA` as a solver of benchopt."""

from __future__ import annotations

from typing import Any, ClassVar

import bilevel as bl
from referee.bridge import StochasticSolver


class Solver(StochasticSolver):
    """Step sizes fall like k^−0.4 for w and k^−0.6 for λ: two time scales."""

    name = "bilevel TTSA"
    parameters: ClassVar[dict[str, Any]] = {**StochasticSolver.parameters, "n_hia_steps": [10]}
    exponents: ClassVar[tuple[float, float]] = (0.4, 0.6)

    def algorithm(self, **step_sizes: Any) -> bl.Algorithm:
        return bl.TTSA(self.n_hia_steps, **step_sizes)
