"""Quadratics by `Implicit` with conjugate gradients, and L-BFGS-B outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bilevel as bl
from referee.bridge import TorchSolver, minimise
from referee.objectives import Bridged


class Solver(TorchSolver):
    """The mean of quadratics is a quadratic: its matrices are added up once, inside the time."""

    name = "bilevel Implicit(CG)"

    def skip(self, **objective: Any) -> tuple[bool, str | None]:
        fits = "hess_inner" in objective["f_inner"].__wrapped__.__code__.co_freevars
        return not fits, None if fits else "a solver for quadratics"

    def solve(self, ours: Bridged, show: Callable[[Any], bool]) -> None:
        train, val = (tuple(part.mean(0, keepdim=True).double() for part in data) for data in (ours.train, ours.val))
        start = self.w0.double()
        minimise(
            bl.Problem(ours.inner, ours.outer, lambda lam: start),
            self.lam0.double(),
            bl.Task(train, val),
            show,
            steps=0,
            start=start,
            method=bl.Implicit(bl.CG(tol=1e-6), newton=1e-6),
            algorithm=bl.LBFGSB(tol=0.0, max_iter=1000),
        )
