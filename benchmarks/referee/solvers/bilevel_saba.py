"""The algorithm `bilevel.SABA` as a solver of benchopt."""

from __future__ import annotations

from typing import Any

import bilevel as bl
from referee.bridge import StochasticSolver


class Solver(StochasticSolver):
    """Constant step sizes."""

    name = "bilevel SABA"

    def algorithm(self, **step_sizes: Any) -> bl.Algorithm:
        return bl.SABA(**step_sizes)
