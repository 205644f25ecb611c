"""`bilevel.solve` as a solver of benchopt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import torch
from benchopt import BaseSolver
from benchopt.stopping_criterion import SufficientProgressCriterion
from torch import Tensor

import bilevel as bl
from referee.objectives import Bridged, bridged, kind_of


class TorchSolver(BaseSolver):
    """A solver that calls `bilevel.solve` with benchopt's callback. A subclass implements `prepare` and `solve`."""

    stopping_criterion = SufficientProgressCriterion(patience=1000, strategy="callback")
    requirements = ("pip::bilevel",)
    parameters: ClassVar[dict[str, Any]] = {}
    # The kinds of problems that the solver can solve.
    kinds: ClassVar[tuple[str, ...]] = ("quadratics", "logistic", "cleaning")

    def skip(self, **objective: Any) -> tuple[bool, str | None]:
        kind = kind_of(objective["f_inner"])
        return (True, f"not a solver for {kind}") if kind not in self.kinds else (False, None)

    def set_objective(
        self, f_inner: Any, f_outer: Any, n_inner_samples: int, n_outer_samples: int, inner_var0: Any, outer_var0: Any
    ) -> None:
        self.w0, self.lam0 = (torch.from_numpy(np.array(x)) for x in (inner_var0, outer_var0))
        self.inner_var, self.outer_var = self.w0, self.lam0
        self.prepare(bridged(f_inner, f_outer))
        # A warm-up, which is not timed. The referee's solvers compile in theirs. Here the problem is checked, and the
        # passed checks are cached. One iteration is enough.
        self.frequency = 1
        self.run_once(2)
        self.frequency = getattr(self, "eval_freq", 1)

    def prepare(self, ours: Bridged) -> None:
        """Declare the problem. This is not timed, so do all computations with the data in `solve`."""
        raise NotImplementedError

    def solve(self, show: Callable[[Any], bool]) -> None:
        """Call `minimise` with `show`."""
        raise NotImplementedError

    def result(self, here: bl.Iteration) -> tuple[Tensor, Tensor]:
        """w and λ of a hyperiteration, in the form of the referee's problem."""
        return here.hypergradient.inner, here.lam

    def run(self, callback: Callable[[], bool]) -> None:
        self.inner_var, self.outer_var = self.w0, self.lam0
        if callback():

            def show(here: bl.Iteration) -> bool:
                if (here.k + 1) % self.frequency:
                    return False
                self.inner_var, self.outer_var = self.result(here)
                return not callback()

            self.solve(show)

    def get_result(self) -> dict[str, Any]:
        found = ((self.inner_var, self.w0), (self.outer_var, self.lam0))
        parts = (x.detach().reshape(like.shape).to(like.dtype).numpy() for x, like in found)
        return dict(zip(("inner_var", "outer_var"), map(jnp.asarray, parts), strict=True))


class StochasticSolver(TorchSolver):
    """One of our single-loop algorithms, with the settings and batches of the referee's solver of the same name.

    Step sizes are step_size / (k + 1)^a for w and step_size / outer_ratio / (k + 1)^b for λ. If the batch size does not
    divide the number of samples, the nearest size that does is used.
    """

    parameters: ClassVar[dict[str, Any]] = {
        "step_size": [0.1],
        "outer_ratio": [1.0],
        "batch_size": [64],
        "eval_freq": [16],
        "random_state": [1],
    }
    # The exponents (a, b), as in the referee's solver.
    exponents: ClassVar[tuple[float, float]] = (0.0, 0.0)

    def prepare(self, ours: Bridged) -> None:
        self.problem = ours.problem(self.w0)
        train, val = (
            bl.FixedBatches(data, nearest_divisor(len(data[0]), self.batch_size), self.random_state)
            for data in (ours.train, ours.val)
        )
        self.task = bl.Task(train, val)

    def algorithm(self, **step_sizes: Any) -> bl.Algorithm:
        """The algorithm with these step sizes and the solver's other settings."""
        raise NotImplementedError

    def solve(self, show: Callable[[Any], bool]) -> None:
        (a, b), outer = self.exponents, self.step_size / self.outer_ratio
        sizes = {"inner_lr": lambda k: self.step_size / (k + 1) ** a, "outer_lr": lambda k: outer / (k + 1) ** b}
        algorithm = self.algorithm(**sizes, seed=self.random_state)
        minimise(self.problem, self.lam0, self.task, show, algorithm=algorithm)


def minimise(problem: bl.Problem, lam: Tensor, task: bl.Task, show: Callable[[Any], bool], **settings: Any) -> None:
    """Call `bilevel.solve`, which runs until the callback stops it."""
    bl.solve(
        problem, lam, task, iterations=10**7, callbacks=[show], progress=False, raise_on_failure=True, **settings
    )  # fmt: skip


def nearest_divisor(number: int, size: int) -> int:
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(d - size))
