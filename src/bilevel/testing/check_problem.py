"""Check a problem before a long run."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bilevel import trees
from bilevel.dynamics import DynamicsLike
from bilevel.errors import BilevelError, BilevelWarning
from bilevel.hypergradients import hypergradient, value_of
from bilevel.linear_solvers.base import random_directions
from bilevel.methods.reverse import Reverse
from bilevel.methods.unrolled import Unrolled
from bilevel.problem import Problem, Task
from bilevel.testing.differences import relative_error, slope_along
from bilevel.trees import Tree


@dataclass(frozen=True)
class ProblemReport:
    """The measurements of `check_problem`.

    Attributes:
        value: f_T(λ).
        differences: largest relative disagreement of directional derivatives with central differences.
        methods: relative disagreement between `Reverse`, which replays steps, and `Unrolled`, which records them.
        directions: how many random directions of λ were tried.
    """

    value: float
    differences: float
    methods: float
    directions: int

    def __str__(self) -> str:
        return (
            f"The problem is sound: f_T(λ) = {self.value:.6g}; hypergradients agree with central differences to "
            f"{self.differences:.1e} in {self.directions} directions, and replayed steps with recorded ones to "
            f"{self.methods:.1e}."
        )


def check_problem(
    problem: Problem,
    lam: Tree,
    task: Task,
    *,
    dynamics: DynamicsLike,
    steps: int,
    directions: int = 5,
    tolerance: float | None = None,
    allow_unused: bool = False,
) -> ProblemReport:
    """Raise a `BilevelError` that says what is wrong with a problem, or return the measured disagreements.

    It checks λ, shapes and dtypes; that every leaf of λ reaches an objective; that values and gradients are finite;
    that `inner`, `outer` and `task.train` are pure; and that hypergradients agree with central differences along random
    directions. Run it in float64 on a small task: in float32 differences have about three correct digits.

    Args:
        problem, lam, task, dynamics, steps, allow_unused: as for `hypergradient`.
        directions: random directions in λ for the differences.
        tolerance: allowed relative disagreement; 1e-5 in float64 and 2e-2 in float32 by default.
    """
    leaves = trees.leaves(lam)
    single = any(getattr(leaf, "dtype", None) != torch.float64 for leaf in leaves)
    tolerance = (2e-2 if single else 1e-5) if tolerance is None else tolerance
    settings: dict[str, Any] = {"dynamics": dynamics, "steps": steps}

    recorded = hypergradient(problem, lam, task, method=Unrolled(), allow_unused=allow_unused, **settings)
    replayed = hypergradient(problem, lam, task, method=Reverse(), allow_unused=allow_unused, **settings)

    def value(lam: Tree) -> Tensor:
        return value_of(problem, lam, task, **settings)

    values = [float(value(lam)) for _ in range(2)]
    if values[0] != values[1]:
        raise BilevelError(
            f"f_T(λ) was {values[0]!r} and then {values[1]!r} for the same λ: something in inner, outer, init or "
            "task.train is not pure. Look for dropout, random augmentation or a sampler with hidden state, and make "
            "each a function of t."
        )
    disagreement = relative_error(replayed.grad, recorded.grad)
    if disagreement > tolerance:
        raise BilevelError(
            f"Replaying the steps gives a hypergradient that differs by {disagreement:.2g} (relative) from recording "
            "them: a step is not a pure function of (w, λ, t, batch)."
        )
    worst = 0.0
    spec = trees.flatten(lam)[1]
    scale = max(float(trees.norm(recorded.grad)), 1e-12)
    for index, row in enumerate(random_directions(directions, trees.to_vector(leaves), seed=17)):
        direction = spec.unflatten(trees.from_vector(row / row.norm(), leaves))
        expected = slope_along(value, lam, direction, 1e-2 if single else 1e-4)
        found = float(trees.dot(recorded.grad, direction))
        worst = max(worst, abs(found - expected) / scale)
        if worst > tolerance:
            raise BilevelError(
                f"Along random direction {index} of λ the hypergradient gives the slope {found:.8g}, but central "
                f"differences give {expected:.8g}. An objective uses an operation whose derivative is not its slope: "
                ".detach(), rounding, argmax, a custom autograd.Function, or an in-place change of data."
            )
    if scale == 1e-12:
        warnings.warn(
            "The hypergradient is exactly zero here: λ is stationary, or no step depends on λ from this start.",
            BilevelWarning,
            stacklevel=2,
        )
    return ProblemReport(values[0], worst, disagreement, directions)
