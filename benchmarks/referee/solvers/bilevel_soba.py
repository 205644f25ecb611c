"""The algorithm `bilevel.SOBA` as a solver of benchopt."""

from __future__ import annotations

from typing import Any, ClassVar

import bilevel as bl
from referee.bridge import StochasticSolver


class Solver(StochasticSolver):
    """Step sizes fall like k^−1/2."""

    name = "bilevel SOBA"
    exponents: ClassVar[tuple[float, float]] = (0.5, 0.5)

    def algorithm(self, **step_sizes: Any) -> bl.Algorithm:
        return bl.SOBA(**step_sizes)
