"""Quadratics: `Implicit` with conjugate gradients for the hypergradient, L-BFGS-B for the outer problem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import bilevel as bl
from referee.bridge import TorchSolver, minimise
from referee.objectives import Bridged


class Solver(TorchSolver):
    """The mean of quadratics is a quadratic. Its matrices are averaged once, and the time includes this."""

    name = "bilevel LBFGSB, Implicit(CG)"
    kinds: ClassVar[tuple[str, ...]] = ("quadratics",)

    def prepare(self, ours: Bridged) -> None:
        self.ours, self.start = ours, self.w0.double()
        self.problem = bl.Problem(ours.inner, ours.outer, lambda lam: self.start)

    def solve(self, show: Callable[[Any], bool]) -> None:
        data = self.ours.train, self.ours.val
        train, val = (tuple(part.mean(0, keepdim=True).double() for part in parts) for parts in data)
        minimise(
            self.problem,
            self.lam0.double(),
            bl.Task(train, val),
            show,
            dynamics=bl.GradientDescent(0.1),
            steps=0,
            start=self.start,
            method=bl.Implicit(bl.CG(tol=1e-5), newton=1e-5),
            algorithm=bl.LBFGSB(tol=0.0, max_iter=1000),
        )
