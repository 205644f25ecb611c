"""Check that a step and E give the same result when they are computed again: methods that replay steps, and those that
compare values of E, rely on it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bilevel import trees
from bilevel.dynamics import gradient
from bilevel.engine.process import Process, State
from bilevel.errors import BilevelError


def check_purity(process: Process, state: State) -> None:
    """Run the first step twice, once per problem, and E. ∇L is computed twice too, because a projection, a sign or
    clipping in the first step may hide a random ∇L."""
    bound = process.bound
    with torch.enable_grad():  # an outer objective may take gradients itself
        refuse_impure(bound.outer(state), bound.outer(state), "The outer objective gave another value")
    if process.steps:
        t = process.times[0]
        with torch.no_grad():
            refuse_impure(bound.step(state, t), bound.step(state, t), f"Step {t} gave another result")
            if process.check_results.uses_inner:
                first, again = (gradient(bound.loss(t), state[0]) for _ in range(2))
                refuse_impure(first, again, f"The gradient of the inner objective at step {t} was different")


def refuse_impure(first: Any, again: Any, what: str) -> None:
    """Refuse a step or a gradient that changes when it is computed again: hypergradients would be silently wrong."""
    for one, two in zip(trees.tensors(first), trees.tensors(again), strict=True):
        if trees.is_variable(one) and not _alike(one.detach(), two.detach()):
            raise BilevelError(
                f"{what} when it was computed again, so something in it is not a pure function of (w, λ, t, batch): "
                "dropout without a seed, or a sampler with hidden state. Make random masks and batches functions of t, "
                "for example with torch.Generator().manual_seed(t), or call .eval() on the module."
            )


def _alike(one: Tensor, two: Tensor) -> bool:
    # On a CPU a pure function gives the same bits. On a GPU atomic additions may change the last ones.
    tolerance = torch.finfo(one.dtype).eps ** 0.5
    return torch.allclose(one, two, rtol=tolerance, atol=tolerance, equal_nan=True)
