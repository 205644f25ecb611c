"""The algorithm `bilevel.StocBiO` as a solver of benchopt."""

from __future__ import annotations

from typing import Any, ClassVar

import bilevel as bl
from referee.bridge import StochasticSolver


class Solver(StochasticSolver):
    """Constant step sizes."""

    name = "bilevel StocBiO"
    parameters: ClassVar[dict[str, Any]] = {**StochasticSolver.parameters, "n_inner_steps": [10], "n_shia_steps": [10]}

    def algorithm(self, **step_sizes: Any) -> bl.Algorithm:
        return bl.StocBiO(self.n_inner_steps, self.n_shia_steps, **step_sizes)
