"""The algorithm `bilevel.AmIGO` as a solver of benchopt."""

from __future__ import annotations

from typing import Any, ClassVar

import bilevel as bl
from referee.bridge import StochasticSolver


class Solver(StochasticSolver):
    """Constant step sizes."""

    name = "bilevel AmIGO"
    parameters: ClassVar[dict[str, Any]] = {**StochasticSolver.parameters, "n_inner_steps": [10]}

    def algorithm(self, **step_sizes: Any) -> bl.Algorithm:
        return bl.AmIGO(self.n_inner_steps, **step_sizes)
