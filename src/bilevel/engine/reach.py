"""Check that every leaf of λ reaches an objective, on a path that the method differentiates."""

from __future__ import annotations

from typing import Any

import torch

from bilevel import trees
from bilevel.dynamics import gradient
from bilevel.engine.graphs import reached
from bilevel.engine.limits import reached_at_rest
from bilevel.engine.method import EVERYTHING, Method, Part
from bilevel.engine.process import Process
from bilevel.errors import BilevelError
from bilevel.trees import Tree

# The step whose objective is checked if there are no steps.
FIRST = range(1, 2)


def check_reach(process: Process, method: Method, state: Any) -> None:
    """Refuse a leaf of λ that reaches no objective, or only on a path that the method does not differentiate."""
    seen = method.sees(process)
    if process.start is not None or (process.previous is not None and process.previous.tangents is None):
        # init(λ) is not used; a continued run depends on it only through the tangents of forward mode.
        seen -= {"the start"}
    reach = _reach(process, method, state)
    paths = trees.paths(process.lam)
    for index, path in enumerate(paths):
        parts = {part for part, leaves in reach.items() if index in leaves}
        if parts & seen:
            continue
        name = type(method).__name__
        if parts:
            others = " and ".join(sorted(parts))
            advice = "Use Reverse() or Forward(), which differentiate the steps."
            if process.start is not None and parts == {"the start"}:
                advice = f"init(λ) is not used when the run begins at a given w: remove λ{path}, or use a cold start."
            elif name == "Truncated":
                advice = "Use Reverse(), which differentiates all steps."
            raise BilevelError(
                f"{name} cannot see λ{path}: it enters through {others} only, and {name} differentiates "
                f"{' and '.join(sorted(seen))}. The gradient would silently be 0. {advice}"
            )
        if not process.allow_unused:
            raise BilevelError(
                f"λ{path} reaches neither the inner nor the outer "
                f"objective{' (with steps=0 the inner one is never used)' if not process.steps else ''}, so its "
                "gradient would always be zero. Remove it from λ, use it, or pass allow_unused=True. (A .detach(), "
                ".item() or torch.no_grad() on the way cuts it off too.)"
            )


def needs_inner_gradient(method: Method, seen: frozenset[Part]) -> bool:
    """Whether a method needs the gradient of the inner objective at w_T, even if there are no steps."""
    return not method.sees_dynamics and "the inner objective" in seen


def _reach(process: Process, method: Method, state: Any) -> dict[Part, set[int]]:
    """The leaves of λ that enter each part, read from the autograd graphs of Φ_0, ∇L, Φ_t and E."""
    bound, variables = process.bound, process.variables
    reach: dict[Part, set[int]] = {part: set() for part in EVERYTHING}
    inner: set[int] = set()
    steps: set[int] = set()

    def leaves_of_lam(indices: set[int]) -> set[int]:
        found = [
            {i} if i < process.outer_count else process.reached_by_encoded(i - process.outer_count) for i in indices
        ]
        return set().union(*found)

    def of(outputs: Tree) -> set[int]:
        return leaves_of_lam(reached(trees.leaves(outputs), variables))

    with torch.enable_grad():
        reach["the start"] = of(process.problem.init(bound.lam))
        reach["the outer objective"] = of(bound.outer(state))
        all_leaves = set(range(process.outer_count))
        # A leaf that the first step does not reach may be reached by a later one. With allow_unused this is not tested.
        times = process.times or (FIRST if needs_inner_gradient(method, method.sees(process)) else FIRST[:0])
        for t in times[:1] if process.allow_unused else times:
            if not method.second_derivatives:
                # The step need not be differentiable: the result is read from the objective and the settings.
                reach["the inner objective"] = of(bound.loss(t)(state[0]))
                reach["the dynamics"] = of(list(vars(bound.dynamics).values()))
                break
            if process.check_results.uses_inner:
                inner |= of(gradient(bound.loss(t), state[0]))
            at_rest = bound.dynamics.stationary_step(bound.loss(t), state[0], t)
            if at_rest is not None or method.exact:
                reach["the fixed point"] |= of(at_rest)
            else:
                reach["the fixed point"] |= leaves_of_lam(reached_at_rest(bound, variables, state[0], t))
            after = bound.step(state, t)
            steps |= of(after)
            # A method that differentiates the steps sees the inner objective through them only: a step may detach it.
            reach["the inner objective"] = inner & steps if method.sees_dynamics else inner
            reach["the dynamics"] = steps - inner
            # A setting with a value per step is reached by a later step, and a bound when w comes to it; usually the
            # first step is enough.
            if set().union(*reach.values()) >= all_leaves:
                break
            state = trees.detach(after)
    return reach
