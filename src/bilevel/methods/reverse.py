"""Reverse mode from stored iterates: the paper's Algorithm 1 for any dynamics."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Self

from bilevel import trees
from bilevel.errors import BilevelError
from bilevel.methods.base import Hypergradient, Method
from bilevel.methods.process import Gradients, Process, State, accumulate, start_vjp, step_vjp


@dataclass(frozen=True)
class Reverse(Method):
    """α_T = ∇_w E, then for t = T…1: p ← p + α_t ∂Φ_t/∂λ, α_{t−1} = α_t ∂Φ_t/∂w (Algorithm 1).

    The forward pass keeps the iterates only; each step is replayed when its turn comes, so a single step's graph exists at a time.

    Args:
        checkpoints: None keeps all T iterates. A number k keeps k of them and recomputes the rest, a segment at a time, for one more
            forward pass in all: k + T/k iterates at most. "sqrt" takes k = √T.
    """

    checkpoints: int | str | None = None

    def check(self, process: Process) -> None:
        if self.checkpoints in (None, "sqrt") or (isinstance(self.checkpoints, int) and self.checkpoints >= 1):
            return
        raise BilevelError(f"Reverse(checkpoints={self.checkpoints!r}) is not possible: pass None, a number ≥ 1, or 'sqrt'.")

    def __call__(self, process: Process) -> Hypergradient:
        bound, times = process.bound, process.times
        length = _segment_length(self.checkpoints, process.steps)
        segments = [times[i : i + length] for i in range(0, len(times), length)]

        with torch.no_grad():
            state = bound.start()
            kept: list[State] = []
            for segment in segments:
                kept.append(state)
                for t in segment if segment is not segments[-1] else segment[:0]:
                    state = bound.step(state, t)

        sweep: Sweep | None = None
        memory = steps = 0
        for segment in reversed(segments):
            states = [kept.pop()]
            with torch.no_grad():
                for t in segment:
                    states.append(bound.step(states[-1], t))
            memory = max(memory, trees.nbytes(kept) + trees.nbytes(states))
            steps += len(segment) * (1 if sweep is None or len(segments) == 1 else 2)
            if sweep is None:
                sweep = Sweep(process, states[-1])
            sweep.through(states, segment)
        if sweep is None:
            sweep = Sweep(process, state)
        sweep.through_start()
        return self.result(process, sweep.value, sweep.last, sweep.gradients, steps=steps, replayed=process.steps, peak_memory=memory)

    @classmethod
    def examples(cls) -> list[Self]:
        return [cls(), cls(checkpoints=3), cls(checkpoints="sqrt")]


class Sweep:
    """The backward half of Algorithm 1: α and p, carried from w_T towards w_0."""

    def __init__(self, process: Process, last: State) -> None:
        self.process = process
        self.last = last
        self.alpha: list[Tensor | None]
        self.gradients: Gradients
        self.value, self.alpha, self.gradients = process.outer_gradients(last)
        self._replay_checked = False

    def through(self, states: list[State], times: range) -> None:
        """Back through the steps `times`, whose states before and after are `states`; they are released on the way."""
        for t in reversed(times):
            after = states.pop()
            self.alpha, parts, replayed = step_vjp(self.process.bound, states[-1], t, self.alpha, self.process.variables)
            self.gradients = [accumulate(total, part) for total, part in zip(self.gradients, parts, strict=True)]
            if not self._replay_checked:
                _refuse_impure(after, replayed, t)
                self._replay_checked = True

    def through_start(self) -> None:
        parts = start_vjp(self.process.bound, self.alpha, self.process.variables)
        self.gradients = [accumulate(total, part) for total, part in zip(self.gradients, parts, strict=True)]


def _segment_length(checkpoints: int | str | None, steps: int) -> int:
    if checkpoints is None or steps == 0:
        return max(steps, 1)
    count = math.isqrt(steps) if checkpoints == "sqrt" else int(checkpoints)
    return math.ceil(steps / max(1, min(count, steps)))


def _refuse_impure(first: State, again: State, t: int) -> None:
    """A step that gives another result when it is replayed would make every gradient silently wrong."""
    for one, two in zip(trees.tensors(first), trees.tensors(again), strict=True):
        tolerance = 1e-3 if one.dtype in (torch.float16, torch.bfloat16) else 1e-6 if one.dtype == torch.float64 else 1e-4
        if trees.is_variable(one) and not torch.allclose(one, two.detach(), rtol=tolerance, atol=tolerance, equal_nan=True):
            raise BilevelError(
                f"Step {t} gave another result when it was replayed, so something in it is not a pure function of (w, λ, t, batch): a sampler "
                "with hidden state, or dropout without a seed. Make batches and random masks functions of t, for example "
                "torch.Generator().manual_seed(t)."
            )
