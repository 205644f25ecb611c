"""Reverse mode through the whole recorded run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bilevel import trees
from bilevel.methods.base import Hypergradient, Method
from bilevel.methods.process import Process, State


@dataclass(frozen=True)
class Unrolled(Method):
    """Record all T steps in one autograd graph, then differentiate it.

    The fastest way where the graph fits: memory grows with T times the activations of a step. `Reverse` computes the
    same number from the iterates alone.
    """

    def __call__(self, process: Process) -> Hypergradient:
        value, state = record(process)
        gradients = list(torch.autograd.grad(value, process.variables, allow_unused=True))
        memory = process.steps * process.recorded_bytes(state)
        return self.result(
            process, value.detach(), trees.detach(state), gradients, steps=process.steps, peak_memory=memory
        )


def record(process: Process) -> tuple[Tensor, State]:
    """f_T and the last state, with all T steps in one graph."""
    bound = process.bound
    with torch.enable_grad():
        state = bound.start()
        for t in process.times:
            state = bound.step(state, t)
        return bound.outer(state), state
