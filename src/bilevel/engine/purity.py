"""Check that the start, a step and E give the same result when they are computed again, and change nothing in place:
methods that replay steps, and those that compare values of E, rely on it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bilevel import trees
from bilevel.dynamics import Dynamics, gradient
from bilevel.engine.process import Bound, Process, State
from bilevel.errors import BilevelError


def check_purity(process: Process, state: State, after: State) -> None:
    """Compute init, E, the first step and the last one twice, once per problem. ∇L is computed twice too, because a
    projection, a sign or clipping in a step may hide a random ∇L.

    Args:
        state, after: the start, and the state after the first step. E and the last step are computed from the second,
            because many starts are zero, which hides noise that multiplies w.
    """
    bound, after = process.bound, trees.detach(after)
    if process.start is None and process.previous is None:
        with torch.no_grad():
            refuse_impure(bound.start(), bound.start(), "init(λ) gave another start")
    with torch.enable_grad():  # an outer objective may take gradients itself
        value = bound.outer(after)
    # A dynamics that is a function of λ is made again: its settings may be random.
    other = bound if isinstance(process.source, Dynamics) else process.bind(process.variables)
    ends = [(process.times[0], state), (process.times[-1], after)] if process.steps else []
    for t, point in ends[: process.steps]:
        _check_step(process, other, point, t)
    # After the steps, because they may change what E reads: the running averages of a batch norm.
    with torch.enable_grad():
        refuse_impure(value, bound.outer(after), "The outer objective gave another value")


def _check_step(process: Process, other: Bound, state: State, t: int) -> None:
    bound = process.bound
    with torch.no_grad():
        refuse_impure(bound.step(state, t), other.step(state, t), f"Step {t} gave another result")
        if process.check_results.uses_inner:
            first, again = (gradient(bound.loss(t), state[0]) for _ in range(2))
            refuse_impure(first, again, f"The gradient of the inner objective at step {t} was different")


def refuse_impure(first: Any, again: Any, what: str) -> None:
    """Refuse a step or a gradient that changes when it is computed again: hypergradients would be silently wrong."""
    for one, two in zip(trees.tensors(first), trees.tensors(again), strict=True):
        if trees.is_variable(one) and not _alike(one.detach(), two.detach()):
            raise BilevelError(
                f"{what} when it was computed again, so something in it is not a pure function of (w, λ, t, batch): "
                "random numbers or dropout without a seed, or a sampler with hidden state. Draw a random start once, "
                "outside of init. Make random masks and batches functions of t, for example with "
                "torch.Generator().manual_seed(t), or call .eval() on the module. A module in train mode may keep "
                "statistics that another call reads; bilevel.functional(module) keeps none."
            )


def _alike(one: Tensor, two: Tensor) -> bool:
    # On a CPU a pure function gives the same bits. On a GPU atomic additions may change the last ones.
    tolerance = torch.finfo(one.dtype).eps ** 0.5
    return torch.allclose(one, two, rtol=tolerance, atol=tolerance, equal_nan=True)
