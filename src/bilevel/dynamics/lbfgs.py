"""L-BFGS with a strong Wolfe line search, by torch, as a solver that runs to a tolerance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from bilevel import trees
from bilevel.dynamics.base import Dynamics, Loss
from bilevel.trees import Tree


@dataclass(frozen=True)
class LBFGS(Dynamics):
    """A step is a whole run of `torch.optim.LBFGS`, until the largest entry of |∇L| is at most `tol`: T = 1 is enough.

    The run is not differentiable, so that `Implicit()` is the method to use; methods that differentiate the steps are
    refused. `stats.iterations` is the number of its iterations.

    Args:
        tol: the tolerance. Line searches compare values of L, so that a tolerance below the root of the rounding error,
            about 1e-8 in float64, may not be reached; `Implicit(newton=1e-12)` continues from there.
        max_iter: the most iterations of a step.
        history: the number of pairs that approximate the Hessian.

    >>> import bilevel as bl
    >>> problem = bl.Problem(
    ...     lambda w, lam, _: (torch.cosh(w - lam) + w**2).sum(), lambda w, lam, _: w.sum(), torch.zeros_like
    ... )
    >>> run = {"dynamics": bl.LBFGS(), "steps": 1, "method": bl.Implicit()}
    >>> hg = bl.hypergradient(problem, torch.ones(2).double(), bl.Task(None, None), **run)
    >>> hg.stats.iterations > 1, hg.stats.steps
    (True, 1)
    """

    tol: float = 1e-7
    max_iter: int = 1000
    history: int = 20

    differentiable: ClassVar[bool] = False
    undifferentiated: ClassVar[tuple[str, ...]] = ("tol",)

    def init(self, w: Tree) -> Tree:
        return solver_state(0, False, w)

    def step(self, loss: Loss, w: Tree, state: dict[str, Tensor], t: int) -> tuple[Tree, Tree]:
        points, spec = trees.flatten(w)
        leaves = [point.detach().clone().requires_grad_() for point in points]

        def closure() -> Tensor:
            with torch.enable_grad():
                value = loss(spec.unflatten(leaves))
                slopes = torch.autograd.grad(value, leaves, allow_unused=True)
            for leaf, slope in zip(leaves, slopes, strict=True):
                leaf.grad = torch.zeros_like(leaf) if slope is None else slope.detach()
            return value.detach()

        def largest() -> float:
            closure()
            return max(float(leaf.grad.abs().max()) for leaf in leaves if leaf.grad is not None)

        solver = torch.optim.LBFGS(
            leaves,
            max_iter=self.max_iter,
            max_eval=5 * self.max_iter,
            tolerance_grad=self.tol,
            # Values of the loss stop changing while ‖∇L‖ is still about the square root of the rounding error.
            tolerance_change=0.0,
            history_size=self.history,
            line_search_fn="strong_wolfe",
        )
        solver.step(closure)  # type: ignore[no-untyped-call]
        spent, converged = int(solver.state[leaves[0]]["n_iter"]), largest() <= self.tol
        found = spec.unflatten([leaf.detach() for leaf in leaves])
        return found, solver_state(int(state["iterations"]) + spent, converged, w)

    def iterations(self, state: dict[str, Tensor]) -> int:
        return int(state["iterations"])

    def finished(self, state: dict[str, Tensor]) -> bool:
        return bool(state["converged"])

    @classmethod
    def examples(cls) -> list[Self]:
        return [cls(1e-8)]


def solver_state(iterations: int, converged: bool, w: Tree) -> dict[str, Tensor]:
    """The auxiliary variables of a solver: counts, which are not differentiated."""
    device = trees.leaves(w)[0].device
    return {
        "iterations": torch.tensor(iterations, device=device),
        "converged": torch.tensor(converged, device=device),
    }
