"""Whether a step gives the same result when it is run again, on which every method that replays or compares relies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bilevel import trees
from bilevel.dynamics import gradient
from bilevel.errors import BilevelError
from bilevel.methods.process import Process, State


def check_purity(process: Process, state: State) -> None:
    """Run the first step twice; once per problem, for all methods alike. ∇L is asked too: a projection, a sign or a
    clipped slope may hide at the first step that it is random."""
    if process.steps:
        t, bound = process.times[0], process.bound
        with torch.no_grad():
            refuse_impure(bound.step(state, t), bound.step(state, t), f"Step {t} gave another result")
            if "inner is not used" not in process.findings:
                first, again = (gradient(bound.loss(t), state[0]) for _ in range(2))
                refuse_impure(first, again, f"The gradient of the inner objective at step {t} was another")


def refuse_impure(first: Any, again: Any, what: str) -> None:
    """A step or a slope that is another when it is computed again would make every gradient silently wrong."""
    for one, two in zip(trees.tensors(first), trees.tensors(again), strict=True):
        if trees.is_variable(one) and not _alike(one.detach(), two.detach()):
            raise BilevelError(
                f"{what} when it was computed again, so something in it is not a pure function of (w, λ, t, batch): "
                "dropout without a seed, or a sampler with hidden state. Make random masks and batches functions of t, "
                "for example with torch.Generator().manual_seed(t), or call .eval() on the module."
            )


def _alike(one: Tensor, two: Tensor) -> bool:
    # On one machine a pure function gives the same bits; a few of them are left to atomics on a GPU.
    tolerance = torch.finfo(one.dtype).eps ** 0.5
    return torch.allclose(one, two, rtol=tolerance, atol=tolerance, equal_nan=True)
