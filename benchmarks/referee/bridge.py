"""`solve` behind the interface of benchopt's solvers."""

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
from referee.objectives import Bridged, checked


class TorchSolver(BaseSolver):
    """A call of `bilevel.solve`. A subclass writes `solve`; the callback of benchopt is a callback of `solve`."""

    stopping_criterion = SufficientProgressCriterion(patience=1000, strategy="callback")
    requirements = ("pip::bilevel",)
    parameters: ClassVar[dict[str, Any]] = {}

    def set_objective(
        self, f_inner: Any, f_outer: Any, n_inner_samples: int, n_outer_samples: int, inner_var0: Any, outer_var0: Any
    ) -> None:
        self.bridged = checked(f_inner, f_outer, inner_var0, outer_var0)
        self.w0, self.lam0 = (torch.from_numpy(np.array(x)) for x in (inner_var0, outer_var0))
        self.inner_var, self.outer_var = self.w0, self.lam0
        # The warm-up of the others compiles; this one fills the caches of the libraries.
        self.run_once(2)

    def run(self, callback: Callable[[], bool]) -> None:
        self.inner_var, self.outer_var = self.w0, self.lam0
        if callback():

            def show(here: Any) -> bool:
                self.outer_var, self.inner_var = here.lam, here.hypergradient.inner
                return not callback()

            self.solve(self.bridged, show)

    def solve(self, ours: Bridged, show: Callable[[Any], bool]) -> None:
        raise NotImplementedError

    def get_result(self) -> dict[str, Any]:
        like = self.w0, self.lam0
        found = (
            x.detach().reshape(y.shape).to(y.dtype) for x, y in zip((self.inner_var, self.outer_var), like, strict=True)
        )
        return dict(zip(("inner_var", "outer_var"), (jnp.asarray(x.numpy()) for x in found), strict=True))


def minimise(problem: bl.Problem, lam: Tensor, task: bl.Task, show: Callable[[Any], bool], **settings: Any) -> None:
    """`solve` with what all solvers here share."""
    bl.solve(
        problem,
        lam,
        task,
        dynamics=bl.GradientDescent(0.1),
        iterations=10**6,
        callbacks=[show],
        progress=False,
        raise_on_failure=True,
        **settings,
    )
