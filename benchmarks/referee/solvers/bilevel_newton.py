"""A penalty per feature of a logistic regression: `NewtonLinear` inside, L-BFGS-B outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import bilevel as bl
from bilevel.structures.held_out import HeldOutLoss
from bilevel.structures.losses import LogLoss
from referee.bridge import TorchSolver, minimise
from referee.objectives import Bridged


class Solver(TorchSolver):
    """The inner objective declares that it is a linear model, and Newton's method solves it."""

    name = "bilevel NewtonLinear"

    def skip(self, **objective: Any) -> tuple[bool, str | None]:
        fits = objective["inner_var0"].shape == objective["outer_var0"].shape
        return not fits, None if fits else "a solver for a penalty per feature"

    def solve(self, ours: Bridged, show: Callable[[Any], bool]) -> None:
        def rows(data: Any) -> tuple[Any, ...]:
            x, y = (part.double() for part in data)
            return x, (y > 0).double()[None], torch.full((1, len(x)), 1 / len(x), dtype=torch.float64)

        model = bl.LinearModels(LogLoss(), torch.exp)
        none = torch.zeros((), dtype=torch.float64)
        start = torch.zeros(1, 1, len(self.w0), dtype=torch.float64)
        problem = bl.Problem(model, HeldOutLoss(model, lambda lam, data: none), lambda lam: start)
        task = bl.Task(rows(ours.train), (*rows(ours.val), none))
        minimise(
            problem,
            self.lam0.double(),
            task,
            show,
            steps=0,
            start=start,
            method=bl.NewtonLinear(tol=1e-4),
            algorithm=bl.LBFGSB(tol=0.0, max_iter=1000),
        )
