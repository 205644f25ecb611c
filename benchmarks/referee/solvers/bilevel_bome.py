"""The algorithm `bilevel.BOME` as a solver of benchopt."""

from __future__ import annotations

from typing import Any, ClassVar

import bilevel as bl
from referee.bridge import StochasticSolver


class Solver(StochasticSolver):
    """Uses all samples in every iteration and calls the callback after every iteration, like the referee's solver."""

    name = "bilevel BOME"
    batch_size = 10**9
    parameters: ClassVar[dict[str, Any]] = {
        "step_size": [0.1],
        "outer_ratio": [1.0],
        "random_state": [1],
        "n_inner_steps": [10],
        "eta": [0.5],
    }

    def algorithm(self, **step_sizes: Any) -> bl.Algorithm:
        return bl.BOME(self.n_inner_steps, self.eta, **step_sizes)
