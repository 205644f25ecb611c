"""Reverse mode through the last k steps (Shaban et al., 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from typing_extensions import Self

from bilevel import trees
from bilevel.engine.method import EVERYTHING, Hypergradient, Method, Part
from bilevel.engine.process import Process
from bilevel.errors import BilevelError
from bilevel.methods.reverse import GROUP_BYTES, Sweep, advance, group_bytes, group_size, split_from_the_end


@dataclass(frozen=True)
class Truncated(Method):
    """Algorithm 1 stopped after k of its T backward steps.

    It keeps k iterates, and its error falls like the contraction rate to the power k.
    With k ≥ T it is `Reverse`, whose `group_bytes` it shares.
    """

    k: int
    group_bytes: int = GROUP_BYTES
    exact: ClassVar[bool] = False

    def check(self, process: Process) -> None:
        if not isinstance(self.k, int) or self.k < 1:
            raise BilevelError(
                f"Truncated(k={self.k!r}) differentiates no step. Pass k ≥ 1, or FirstOrder() to ignore the dynamics."
            )
        refuse_early_stop(self, self.k, process)

    def sees(self, process: Process) -> frozenset[Part]:
        return EVERYTHING if self.k >= process.steps else EVERYTHING - {"the start"}

    def __call__(self, process: Process) -> Hypergradient:
        return through_last_steps(self, self.k, process, self.group_bytes)

    @classmethod
    def examples(cls) -> list[Self]:
        return [cls(60), cls(1000, group_bytes=0)]


def refuse_early_stop(method: Method, k: int, process: Process) -> None:
    """Refuse to differentiate the last k steps of a dynamics that may have stopped before them."""
    dynamics = process.bound.dynamics
    if dynamics.stops and k < process.steps:
        raise BilevelError(
            f"{type(method).__name__}(k={k}) differentiates the last k of {process.steps} steps, but {dynamics} may "
            "stop before them: w then no longer changes, and the derivative through the earlier steps would be lost. "
            "Use Reverse(), which differentiates all steps, or Implicit()."
        )


def through_last_steps(method: Method, k: int, process: Process, most_bytes: int = GROUP_BYTES) -> Hypergradient:
    """The result of `method`, which differentiates the last k steps and records groups of this size."""
    times = process.times
    window = times[max(0, len(times) - k) :]
    with torch.no_grad():
        starts = [advance(process, process.bound.start(), [times[: len(times) - len(window)]])]
        recorded = process.recorded_bytes(starts[0])
        groups = split_from_the_end(window, group_size(most_bytes, recorded))
        for group in groups[:-1]:
            starts.append(advance(process, starts[-1], [group]))
    memory = trees.nbytes(starts) + group_bytes(groups, recorded)
    sweep = Sweep(process, starts.pop(), groups.pop() if groups else range(0))
    while groups:
        sweep.through(starts.pop(), groups.pop())
    if len(window) == len(times):
        sweep.through_start()
    return method.result(
        process,
        sweep.value,
        sweep.last,
        sweep.gradients,
        steps=process.steps,
        replayed=len(window),
        peak_memory=memory,
    )
