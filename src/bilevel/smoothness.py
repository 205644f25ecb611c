"""`roughness`: over which lengths f_T falls along −∇f_T as its gradient predicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bilevel import trees
from bilevel.dynamics import DynamicsLike
from bilevel.engine.method import Hypergradient, Method
from bilevel.errors import BilevelError, DivergenceError, Outcome
from bilevel.hypergradients import hypergradient, value_of
from bilevel.problem import Problem, Task
from bilevel.trees import Tree

# A step is good if f_T falls by at least this fraction of the predicted decrease, length · ‖∇f_T‖.
GOOD_FRACTION = 0.5
# If the predicted change is this many times the change of f_T, f_T is rough on this length.
ROUGH = 10.0


@dataclass(frozen=True)
class Roughness:
    """How f_T changes along −∇f_T.

    Attributes:
        value: f_T(λ).
        slope: ‖∇f_T(λ)‖, the decrease of f_T per unit of length that the gradient predicts.
        length: the longest step that was tried, in the norm of λ.
        kept: the longest tried step for which f_T falls by at least half of the predicted decrease, as for all shorter
            ones; 0 if there is none.
        ratio: the largest of length · ‖∇f_T‖ over the change of f_T within that length, to both sides. At most 1 for a
            convex or a concave f_T.
        useful: False if f_T is too rough for its gradient: within some length f_T changes at most a tenth of what the
            gradient predicts.
        outcome: a sentence that says what to do.
    """

    value: float
    slope: float
    length: float
    kept: float
    ratio: float
    useful: bool
    outcome: Outcome

    def __str__(self) -> str:
        step = f"a step of up to {self.kept:.3g}" if self.kept > 0 else "no step"
        return (
            f"f_T(λ) = {self.value:.6g}, ‖∇f_T‖ = {self.slope:.3g}; {step} (tried: up to {self.length:.3g}) achieves "
            f"at least half of the predicted decrease. {self.outcome}"
        )


def roughness(
    problem: Problem,
    lam: Tree,
    task: Task | Sequence[Task],
    *,
    dynamics: DynamicsLike,
    steps: int,
    method: Method | str | Hypergradient | None = None,
    length: float | None = None,
    points: int = 12,
) -> Roughness:
    """Say whether f_T is smooth enough around λ for its gradient to be useful.

    A long run of a chaotic inner problem has an exact gradient that is of no use: f_T oscillates on a scale far below
    any step of an outer optimiser, and ‖∇f_T‖ grows with T like the oscillations. Here f_T is evaluated at λ ± s ∇f_T /
    ‖∇f_T‖ for s = length, length/4, length/16, …, which costs 2 · points runs without a gradient, and compared with the
    prediction f_T(λ) − s ‖∇f_T‖.

    Args:
        problem, lam, task, dynamics, steps: as for `hypergradient`.
        method: how to differentiate, or the `Hypergradient` at λ if it is known.
        length: the longest step to try, for example the first step of your optimiser; by default a tenth of ‖λ‖, or of
            √d if that is larger, for d values in λ.
        points: how many lengths are tried.

    >>> import bilevel as bl
    >>> problem = bl.Problem(
    ...     inner=lambda w, lam, x: (w**2 - lam) ** 2 / 4, outer=lambda w, lam, x: (w - 1) ** 2,
    ...     init=lambda lam: torch.full_like(lam, 0.3),
    ... )
    >>> lam, task = torch.tensor(2.0).double(), bl.Task(None, None)
    >>> bl.roughness(problem, lam, task, dynamics=bl.GradientDescent(0.1), steps=100).useful
    True
    >>> bl.roughness(problem, lam, task, dynamics=bl.GradientDescent(0.95), steps=100).useful
    False
    """
    if points < 2 or (length is not None and not 0 < length < math.inf):
        raise BilevelError(
            f"roughness(length={length}, points={points}) has nothing to compare. Pass a length > 0, and points ≥ 2."
        )
    if isinstance(method, Hypergradient):
        here = method
    else:
        here = hypergradient(problem, lam, task, dynamics=dynamics, steps=steps, method=method, allow_unused=True)
    value, slope = float(here.value), float(trees.norm(here.grad))
    if length is None:
        length = 0.1 * max(float(trees.norm(lam)), trees.size(lam) ** 0.5)
    if not slope > 0:
        outcome = Outcome("finished", "The gradient is zero, so it predicts no decrease.")
        return Roughness(value, 0.0, length, length, 0.0, True, outcome)

    def at(move: float) -> float:
        with torch.no_grad():
            there = trees.map(lambda x, g: x.detach() - move / slope * g, lam, here.grad)
        try:
            return float(value_of(problem, there, task, dynamics=dynamics, steps=steps))
        except DivergenceError:
            return math.inf

    # From short to long: the values seen within a length include those of shorter lengths.
    lengths = [length / 4**i for i in reversed(range(points))]
    precision = torch.finfo(here.value.dtype).eps * max(abs(value), 1e-300)
    kept, missed, ratio, seen = 0.0, False, 0.0, [value]
    for s in lengths:
        down, up = at(s), at(-s)
        seen += [down, up]
        # The predicted decrease of shorter steps is below the rounding error.
        if s * slope < 1e3 * precision:
            continue
        missed = missed or not value - down >= GOOD_FRACTION * s * slope
        kept = kept if missed else s
        change = max(seen) - min(seen)
        ratio = max(ratio, s * slope / change if change > 0 else math.inf)
    useful = ratio < ROUGH
    return Roughness(value, slope, length, kept, ratio, useful, _outcome(kept, length, ratio, useful))


def _outcome(kept: float, length: float, ratio: float, useful: bool) -> Outcome:
    if not useful:
        return Outcome(
            "failed",
            f"f_T is too rough for its gradient: within {length:.3g} it changes {ratio:.3g} times less than the "
            "gradient says. Take a smaller inner step or fewer steps, differentiate the last with Truncated(k), or "
            f"average f_T over steps with ZeroOrder(sigma=…) of about {length / 10:.2g}.",
        )
    if kept >= length:
        return Outcome("finished", "Steps of every length that was tried decrease f_T as predicted.")
    if kept > 0:
        return Outcome("finished", f"f_T changes as its gradient says, but is curved: take steps up to {kept:.2g}.")
    return Outcome(
        "finished",
        "No step that was tried achieves half of the predicted decrease, but f_T changes as much as predicted: λ is "
        "close to a minimiser, or all steps were too long. Pass a smaller length=….",
    )
