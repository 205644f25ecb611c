"""Nonlinear least squares by Levenberg and Marquardt, by scipy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from bilevel import trees
from bilevel.dynamics.base import Dynamics, Loss
from bilevel.dynamics.lbfgs import solver_state
from bilevel.errors import BilevelError
from bilevel.trees import Tree


@dataclass(frozen=True)
class LevenbergMarquardt(Dynamics):
    """A step is a whole run of `scipy.optimize.least_squares` on ½‖r(w, λ)‖²: T = 1 is enough.

    For `Problem(residual=…)`, and for fixed points and roots, whose residual is w − Φ(w) or F(w). The Jacobian is
    dense, for up to some thousand numbers in w. With fewer residuals than numbers in w, scipy's trust-region method is
    used. The run is not differentiable, so that `Implicit()` is the method to use. `stats.iterations` is the number of
    evaluations of r.

    Args:
        tol: scipy's `ftol`, `xtol` and `gtol`.
        max_iter: the most evaluations of r in a step.

    >>> import bilevel as bl
    >>> problem = bl.Problem(
    ...     residual=lambda w, lam, x: (w[0] * torch.exp(-w[1] * x) - lam), outer=lambda w, lam, x: w[1],
    ...     init=lambda lam: torch.ones(2).double(),
    ... )
    >>> x = torch.linspace(0, 2, 9).double()
    >>> run = {"dynamics": bl.LevenbergMarquardt(), "steps": 1, "method": bl.Implicit()}
    >>> hg = bl.hypergradient(problem, 3 * torch.exp(-0.7 * x), bl.Task(x, x), **run)
    >>> [round(float(number), 6) for number in hg.inner], hg.stats.iterations < 20
    ([3.0, 0.7], True)
    """

    tol: float = 1e-12
    max_iter: int = 1000

    equations: ClassVar[bool] = True
    differentiable: ClassVar[bool] = False
    undifferentiated: ClassVar[tuple[str, ...]] = ("tol",)

    def init(self, w: Tree) -> Tree:
        return solver_state(0, False, w)

    def step(self, loss: Loss, w: Tree, state: dict[str, Tensor], t: int) -> tuple[Tree, Tree]:
        residual = getattr(loss, "residual", None)
        if residual is None:
            raise BilevelError(
                f"{self} minimises ½‖r(w)‖² from its residuals r, and this problem has none. Write "
                "Problem(residual=…, outer=…, init=…), or use LBFGS(), which takes any inner objective."
            )
        points, spec = trees.flatten(w)
        like = trees.to_vector(points).detach()

        def residuals(vector: Tensor) -> Tensor:
            parts = trees.leaves(residual(spec.unflatten(trees.from_vector(vector, points))))
            return torch.cat([part.reshape(-1) for part in parts])

        def evaluated(numbers: Any) -> Any:
            with torch.no_grad():
                return residuals(like.new_tensor(numbers)).double().cpu().numpy()

        def jacobian(numbers: Any) -> Any:
            return _jacobian(residuals, like.new_tensor(numbers)).double().cpu().numpy()

        start = like.double().cpu().numpy()
        overdetermined = len(evaluated(start)) >= len(start)
        found = _least_squares()(
            evaluated,
            start,
            jacobian,
            method="lm" if overdetermined else "trf",
            # scipy refuses tolerances below the rounding error of float64.
            **dict.fromkeys(("ftol", "xtol", "gtol"), max(self.tol, 1e-15)),
            max_nfev=self.max_iter,
        )
        after = trees.detach(spec.unflatten(trees.from_vector(like.new_tensor(found.x), points)))
        return after, solver_state(int(state["iterations"]) + int(found.nfev), bool(found.success), w)

    def iterations(self, state: dict[str, Tensor]) -> int:
        return int(state["iterations"])

    def finished(self, state: dict[str, Tensor]) -> bool:
        return bool(state["converged"])

    @classmethod
    def examples(cls) -> list[Self]:
        return [cls()]


def _jacobian(function: Callable[[Tensor], Tensor], vector: Tensor) -> Tensor:
    of: Callable[..., Tensor] = torch.autograd.functional.jacobian
    with torch.enable_grad():
        try:
            return of(function, vector, vectorize=True)
        except RuntimeError:
            # An operation has no batched form.
            return of(function, vector)


def _least_squares() -> Callable[..., Any]:
    try:
        from scipy.optimize import least_squares
    except ImportError as error:
        raise BilevelError(
            "LevenbergMarquardt needs scipy, which is not installed. Install it with: pip install scipy"
        ) from error
    return least_squares
