"""Reverse mode from stored iterates: the paper's Algorithm 1 for any dynamics."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import Self

from bilevel import trees
from bilevel.errors import BilevelError
from bilevel.methods.base import Hypergradient, Method
from bilevel.methods.compiled import run_blocks, sweep_blocks
from bilevel.methods.process import Process, State, accumulate, start_vjp, steps_vjp
from bilevel.methods.purity import refuse_impure

# Steps are recorded together as long as their graphs stay below this: calling autograd costs more than a tiny step,
# and what is recorded at once as it is run for the first time need not be run again.
GROUP_BYTES = 64 * 1024**2
# What the nodes of a recorded step take besides the tensors they keep.
NODE_BYTES = 16 * 1024


@dataclass(frozen=True)
class Reverse(Method):
    """α_T = ∇_w E, then for t = T…1: p ← p + α_t ∂Φ_t/∂λ, α_{t−1} = α_t ∂Φ_t/∂w (Algorithm 1).

    The forward pass keeps iterates only; steps are replayed when their turn comes, so memory does not grow with T times
    the activations of a step. One step's graph exists at a time, or a group of small ones that fit into 64 MB together
    and then share one stored iterate; the last group is recorded as it is run. `stats.peak_memory` is what that comes
    to, in bytes of tensors; the nodes of a graph add about 16 kB a step, and a process may grow by twice as much.

    Args:
        checkpoints: None keeps all T iterates. "sqrt" records more steps together, m = √(T |w| / |graph|) of them, and
            keeps the T/m iterates between: 2 √(T |w| |graph|) bytes, which is the least that can be had with two runs
            of a step, against T |graph| of `Unrolled`. A number k keeps k iterates and recomputes the others a
            segment at a time, with a third run of a step: k + T/k iterates and a group's graph.
        compiled: compile blocks of this many steps with `torch.compile` and keep the iterates at their borders. The
            first call takes up to a minute, later ones a fraction of the eager time; worth it for long runs of small
            steps. 25 is a good number. Numbers that the inner objective and the dynamics read in closures, globals and
            attributes may change, which compiles anew; a change of what is in a dict, a list or an object within an
            object is not noticed. Random numbers are refused.
        group_bytes: record steps together where their graph stays below this; below 64 MB thrift is not worth its
            time. 0 replays every step by itself; "sqrt" is then k = √T: the least memory, and a third run.
    """

    checkpoints: int | str | None = None
    compiled: int | None = None
    group_bytes: int = GROUP_BYTES

    def check(self, process: Process) -> None:
        if self.compiled is not None and (self.compiled < 1 or self.checkpoints is not None):
            raise BilevelError(
                f"{self} is not possible: pass compiled ≥ 1, and no checkpoints with it (a compiled block keeps one "
                "iterate anyway)."
            )
        if self.checkpoints in (None, "sqrt") or (isinstance(self.checkpoints, int) and self.checkpoints >= 1):
            return
        raise BilevelError(
            f"Reverse(checkpoints={self.checkpoints!r}) is not possible: pass None, a number ≥ 1, or 'sqrt'."
        )

    def __call__(self, process: Process) -> Hypergradient:
        if self.compiled is not None and process.steps >= self.compiled:
            return self._in_blocks(process, self.compiled)
        with torch.no_grad():
            checkpoints = [process.bound.start()]
            groups, segments = self._plan(process, checkpoints[0])
            for segment in segments[:-1]:
                checkpoints.append(advance(process, checkpoints[-1], groups[segment[0] : segment[-1] + 1]))

        sweep: Sweep | None = None
        memory = 0
        for segment in reversed(segments):
            starts = [checkpoints.pop()]
            with torch.no_grad():
                for index in segment[:-1]:
                    starts.append(advance(process, starts[-1], groups[index : index + 1]))
            kept = trees.nbytes(checkpoints) + trees.nbytes(starts)
            memory = max(memory, kept + group_bytes(process, groups, starts[0]))
            for index in reversed(segment):
                if sweep is None:
                    sweep = Sweep(process, starts.pop(), groups[index])
                else:
                    sweep.through(starts.pop(), groups[index])
        if sweep is None:
            sweep = Sweep(process, checkpoints.pop())
        sweep.through_start()
        # The last group of every segment is only ever run recorded.
        run_twice = sum(len(groups[i]) for segment in segments for i in segment[:-1])
        first_pass = sum(len(groups[i]) for segment in segments[:-1] for i in segment)
        return self._finish(process, sweep, first_pass + run_twice, memory)

    def _plan(self, process: Process, start: State) -> tuple[list[range], list[range]]:
        """The steps that are recorded together, and which of these groups lie between two checkpoints."""
        size = group_size(process, self.group_bytes, start)
        balanced = self.checkpoints == "sqrt" and self.group_bytes > 0
        if balanced:
            # Where the T/m iterates and the m recorded steps weigh the same, their sum is smallest.
            recorded = NODE_BYTES + process.recorded_bytes(start)
            size = max(size, round(math.sqrt(process.steps * trees.nbytes(start) / recorded)))
        groups = split_from_the_end(process.times, size)
        # Where every group begins at a checkpoint nothing is run a third time.
        length = 1 if balanced else _groups_between_checkpoints(self.checkpoints, process.steps, groups)
        return groups, split_from_the_end(range(len(groups)), length)

    def _in_blocks(self, process: Process, length: int) -> Hypergradient:
        # What does not fill a block is run eagerly at the beginning.
        head, rest = process.times[: process.steps % length], process.times[process.steps % length :]
        with torch.no_grad():
            start = process.bound.start()
            borders = run_blocks(process, length, advance(process, start, [head]), rest)
        memory = trees.nbytes([start, borders])
        sweep = Sweep(process, borders[-1])
        sweep_blocks(sweep, length, borders, rest)
        if head:
            sweep.through(start, head)
        sweep.through_start()
        return self._finish(process, sweep, process.steps, memory)

    def _finish(self, process: Process, sweep: Sweep, steps: int, memory: int) -> Hypergradient:
        costs: dict[str, Any] = {"steps": steps, "replayed": process.steps, "peak_memory": memory}
        return self.result(process, sweep.value, sweep.last, sweep.gradients, **costs)

    @classmethod
    def examples(cls) -> list[Self]:
        return [
            cls(),
            cls(group_bytes=0),
            cls(checkpoints=3, group_bytes=0),
            cls(checkpoints="sqrt", group_bytes=0),
            cls(checkpoints="sqrt", group_bytes=1),
            cls(checkpoints=2, group_bytes=60_000),
        ]


class Sweep:
    """The backward half of Algorithm 1: α and p, carried from w_T towards w_0.

    It begins with the last steps, `times`, which are recorded from the state before them as they are run for the first
    time.
    """

    def __init__(self, process: Process, state: State, times: range = range(0)) -> None:
        self.process = process
        self.value, self.alpha, self.gradients, self.last = process.outer_gradients(state, times)
        # The state that the next replay must arrive at; one comparison is enough to notice an impure step.
        self._arrival: State | None = state if times else None

    def through(self, state: State, times: range) -> None:
        """Back through the steps `times`, replayed from the state before them."""
        self.alpha, parts, replayed = steps_vjp(self.process.bound, state, times, self.alpha, self.process.variables)
        self.gradients = [accumulate(total, part) for total, part in zip(self.gradients, parts, strict=True)]
        if self._arrival is not None:
            refuse_impure(self._arrival, replayed, f"Step {times[-1]} gave another result")
            self._arrival = None

    def through_start(self) -> None:
        parts = start_vjp(self.process.bound, self.alpha, self.process.variables)
        self.gradients = [accumulate(total, part) for total, part in zip(self.gradients, parts, strict=True)]


def advance(process: Process, state: State, groups: list[range]) -> State:
    """The state after all steps of the groups."""
    for times in groups:
        for t in times:
            state = process.bound.step(state, t)
    return state


def group_size(process: Process, group_bytes: int, state: State) -> int:
    """How many steps are recorded at a time."""
    return max(1, group_bytes // (NODE_BYTES + process.recorded_bytes(state)))


def group_bytes(process: Process, groups: list[range], state: State) -> int:
    """The recorded graph of a group, beyond the one step that every method records."""
    return max((len(group) - 1 for group in groups), default=0) * process.recorded_bytes(state)


def split_from_the_end(items: range, size: int) -> list[range]:
    """Consecutive pieces of `size`, of which the first may be shorter.

    >>> split_from_the_end(range(1, 6), 2)
    [range(1, 2), range(2, 4), range(4, 6)]
    """
    short = len(items) % size
    return ([items[:short]] if short else []) + [items[i : i + size] for i in range(short, len(items), size)]


def _groups_between_checkpoints(checkpoints: int | str | None, steps: int, groups: list[range]) -> int:
    if checkpoints is None or not groups:
        return max(len(groups), 1)
    count = math.isqrt(steps) if checkpoints == "sqrt" else int(checkpoints)
    return math.ceil(len(groups) / max(1, min(count, len(groups))))
