"""Reverse mode through the whole recorded run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bilevel import trees
from bilevel.engine.method import Hypergradient, Method
from bilevel.engine.process import Gradients, Process, State


@dataclass(frozen=True)
class Unrolled(Method):
    """Record all T steps in one autograd graph, then differentiate it.

    It is the fastest method if the graph fits into memory, which grows with T times the activations of a step.
    `Reverse` computes the same numbers from the iterates alone.
    """

    def __call__(self, process: Process) -> Hypergradient:
        value, state = record(process)
        gradients: Gradients = [None] * len(process.variables)
        # Without steps, f_T may be a constant, which has no graph.
        if value.requires_grad:
            gradients = list(torch.autograd.grad(value, process.variables, allow_unused=True))
        memory = process.steps * process.recorded_bytes(state)
        return self.result(
            process, value.detach(), trees.detach(state), gradients, steps=process.steps, peak_memory=memory
        )


def record(process: Process) -> tuple[Tensor, State]:
    """f_T and the last state, with all T steps in one graph."""
    state = record_state(process)
    with torch.enable_grad():
        return process.bound.outer(state), state


def record_state(process: Process) -> State:
    """The last state, with all T steps in one graph."""
    with torch.enable_grad():
        state = process.bound.start()
        for t in process.times:
            state = process.bound.step(state, t)
    return state
