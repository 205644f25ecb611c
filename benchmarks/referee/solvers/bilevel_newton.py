"""Logistic regression with one penalty per feature.

`NewtonLinear` solves the inner problem, and spectral projected gradients the outer one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

import bilevel as bl
from bilevel.structures import HeldOutLoss, LinearModels, LogLoss
from referee.bridge import TorchSolver, minimise
from referee.objectives import Bridged


class Solver(TorchSolver):
    """The inner objective is declared as a linear model, so Newton's method can solve it."""

    name = "bilevel SPG, NewtonLinear"
    kinds: ClassVar[tuple[str, ...]] = ("logistic",)

    def prepare(self, ours: Bridged) -> None:
        def rows(data: Any) -> tuple[Any, ...]:
            x, y = data
            return x, (y > 0).to(x.dtype)[None], x.new_full((1, len(x)), 1 / len(x))

        model, none = LinearModels(LogLoss(), torch.exp), self.w0.new_zeros(())
        self.start = self.w0.view(1, 1, -1)
        self.problem = bl.Problem(model, HeldOutLoss(model, lambda lam, data: none), lambda lam: self.start)
        self.task = bl.Task(rows(ours.train), (*rows(ours.val), none))

    def solve(self, show: Callable[[Any], bool]) -> None:
        minimise(
            self.problem,
            self.lam0,
            self.task,
            show,
            dynamics=bl.GradientDescent(0.1),
            steps=0,
            start=self.start,
            method=bl.NewtonLinear(tol=0.1, dense=False),
            algorithm=bl.SPG(tol=0.0, first_step=3.0),
        )
