"""Spectral projected gradients, which choose their own step sizes (Birgin, Martínez and Raydan, 2000)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import Self

from bilevel import trees
from bilevel.algorithms.base import Algorithm, OuterProblem, check_settings
from bilevel.engine.oracles import FlatTree
from bilevel.errors import Outcome

# The number of steps within which f_T must improve.
PATIENCE = 10
# The fraction of the predicted decrease that a step must achieve (Armijo).
SUFFICIENT_DECREASE = 1e-4
# The factor of the step size after a step along which f_T has no positive curvature.
GROWTH = 4.0
# Step sizes stay within this factor of the first one.
RANGE = 1e8
# Steps are not shortened below this fraction.
SHORTEST = 1e-6


@dataclass(frozen=True)
class SPG(Algorithm):
    """λ ← λ + a (P_Λ(λ − γ ∇f_T) − λ), with the step size γ = ⟨s, s⟩/⟨s, y⟩ of the last step s and gradient change y.

    γ is the step of Barzilai and Borwein: the inverse of the curvature along the last step. a = 1 if f_T is then
    below the largest of its last `memory` values; otherwise a is reduced until it is. There is no step size to set, and
    any constraint with a projection works: weights of examples in [0, 1], mixtures on a simplex. f_T must be smooth and
    without noise. Every evaluation of f_T is a hyperiteration, those of shortened steps too. The best λ is returned.

    Args:
        tol: stop when the best value of the last ten steps is not better than the best one before them by more
            than this, relative to it or to the first value. `tol` of `solve` is another condition, on the norm of the
            gradient.
        first_step: about how far each entry of λ moves in the first step, as a root mean square, before the projection.
        memory: how many of the last values f_T is compared with. With 1, f_T falls in every step, which is slower on
            most problems.

    Reference: "Nonmonotone spectral projected gradient methods on convex sets" (SIAM J. Optim. 10, 2000).

    >>> import torch, bilevel as bl
    >>> problem = bl.Problem(
    ...     inner=lambda w, lam, x: ((w - lam) ** 2).sum(),
    ...     outer=lambda w, lam, x: ((w - torch.tensor([1.0, 5.0])) ** 2).sum(),
    ...     init=lambda lam: torch.zeros(2),
    ... )
    >>> sol = bl.solve(
    ...     problem, torch.zeros(2), bl.Task(None, None), dynamics=bl.GradientDescent(0.5), steps=1,
    ...     algorithm=bl.SPG(), constraint=bl.Box(-3, 3),
    ... )
    >>> [round(x, 4) for x in sol.outer.tolist()], sol.outcome.kind
    ([1.0, 3.0], 'converged')
    """

    compares_values: ClassVar[bool] = True
    resumes: ClassVar[bool] = True

    tol: float = 1e-9
    first_step: float = 1.0
    memory: int = 10

    def __post_init__(self) -> None:
        check_settings(self.tol, self.first_step, memory=self.memory)

    def minimise(self, outer: OuterProblem) -> Outcome:
        flat = FlatTree.of(outer.lam)

        def project(lam: Tensor) -> Tensor:
            return lam if outer.constraint is None else flat.vector(outer.constraint.project(flat.tree(lam)))

        def evaluate(lam: Tensor) -> tuple[float, Tensor]:
            result = outer.hyperiteration(flat.tree(lam))
            return float(result.value), flat.vector(result.grad)

        state: dict[str, Any] = dict(outer.saved or {})
        outer.keep(lambda: trees.clone(state))
        if not state:
            lam = flat.vector(outer.lam)
            value, grad = evaluate(lam)
            norm = float(grad.norm())
            first = self.first_step * math.sqrt(len(grad)) / norm if norm > 0 else 1.0
            state |= {"lam": lam, "grad": grad, "first": first, "rate": first, "values": [value], "share": 1.0}
        while True:
            lam, grad, rate, values, share = (state[name] for name in ("lam", "grad", "rate", "values", "share"))
            step = project(lam - rate * grad) - lam
            predicted = float(step @ grad)
            if not predicted < 0:
                return Outcome(
                    "converged", f"Converged after {_steps(values)}: the projected gradient step does not move λ."
                )
            # Projected again, because rounding may leave Λ.
            there = project(lam + share * step)
            value, slope = evaluate(there)
            if value > max(values[-self.memory :]) + SUFFICIENT_DECREASE * share * predicted:
                state["share"] = share * _shortened(values[-1], value, share * predicted)
                if state["share"] < SHORTEST:
                    return Outcome(
                        "finished", f"Stopped after {_steps(values)}: no step along the hypergradient improves f_T."
                    )
                continue
            moved, change = there - lam, slope - grad
            curvature = float(moved @ change)
            rate = float(moved @ moved) / curvature if curvature > 0 else GROWTH * rate
            rate = min(max(rate, state["first"] / RANGE), state["first"] * RANGE)
            state |= {"lam": there, "grad": slope, "rate": rate, "values": [*values, value], "share": 1.0}
            if self._stalled(state["values"]):
                return Outcome(
                    "converged",
                    f"Converged after {_steps(state['values'])}: f_T improves by less than {self.tol:g}, relatively.",
                )

    def _stalled(self, values: list[float]) -> bool:
        before, last = values[:-PATIENCE], values[-PATIENCE:]
        return bool(before) and min(before) - min(last) <= self.tol * max(map(abs, (before[0], min(before))))

    @classmethod
    def examples(cls) -> list[Self]:
        return [cls(), cls(first_step=0.01, memory=1)]


def _shortened(before: float, after: float, predicted: float) -> float:
    """Where the parabola through f_T before and after a step, with the slope before it, is smallest; in [0.1, 0.5]."""
    curvature = after - before - predicted
    return min(max(-0.5 * predicted / curvature, 0.1), 0.5) if math.isfinite(curvature) and curvature > 0 else 0.1


def _steps(values: list[float]) -> str:
    return f"{len(values) - 1} step{'s' if len(values) != 2 else ''}"
