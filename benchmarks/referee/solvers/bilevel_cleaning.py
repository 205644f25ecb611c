"""A weight per example: `Implicit` with a few products per hyperiteration, warm starts, and large steps of λ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

import bilevel as bl
from referee.bridge import TorchSolver, minimise
from referee.objectives import Bridged


class Solver(TorchSolver):
    """w and the adjoint go on from one hyperiteration to the next, so each linear system needs few products."""

    name = "bilevel Implicit"
    parameters: ClassVar[dict[str, Any]] = {"lr": [3.0], "tol": [0.1], "newton": [0.1]}

    def skip(self, **objective: Any) -> tuple[bool, str | None]:
        fits = len(objective["outer_var0"]) == objective["n_inner_samples"]
        return not fits, None if fits else "a solver for a weight per example"

    def solve(self, ours: Bridged, show: Callable[[Any], bool]) -> None:
        minimise(
            ours.problem(self.w0),
            self.lam0,
            ours.task(),
            show,
            steps=0,
            start=self.w0,
            method=bl.Implicit(bl.CG(tol=self.tol), newton=self.newton),
            optimizer=lambda leaves: torch.optim.Adam(leaves, lr=self.lr, betas=(0.5, 0.9)),
        )
