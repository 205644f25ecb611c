"""Reverse mode from kept iterates: the paper's Algorithm 1 for any dynamics."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from bilevel import trees
from bilevel.engine.method import Hypergradient, Method
from bilevel.engine.process import Gradients, Process, State, accumulate, start_vjp, steps_vjp
from bilevel.engine.purity import refuse_impure
from bilevel.engine.recorded import allocated
from bilevel.engine.replay import Plan, Sizes, as_bytes, backwards, format_bytes, runs
from bilevel.errors import BilevelError, BilevelWarning
from bilevel.methods.compiled_blocks import compile_blocks

# Steps are recorded together while their graphs take less than this. For small steps this is faster: it calls autograd
# less often, and the last group is recorded in its first run, so it is not run again.
GROUP_BYTES = 64 * 1024**2
# The bytes of the graph nodes of a recorded step, without the tensors that they keep.
NODE_BYTES = 16 * 1024
# A plan that runs every step more often than this on average is reported.
MANY_RUNS = 20


@dataclass(frozen=True)
class Reverse(Method):
    """α_T = ∇_w E, then for t = T…1: p ← p + α_t ∂Φ_t/∂λ, α_{t−1} = α_t ∂Φ_t/∂w (Algorithm 1).

    The forward run keeps iterates only. The backward pass replays the steps, so memory does not grow with T times the
    activations of a step. It holds the graph of one step at a time, or of a group of small steps that together take up
    to 64 MB and share one kept iterate. The last group is recorded in its first run. `stats.peak_memory`
    counts the bytes of tensors. The nodes of a graph add about 16 kB a step, and the operating system may report twice
    as much.

    Args:
        checkpoints: None keeps all T iterates. "sqrt" records more steps together, m = √(T |w| / |graph|) of them, and
            keeps the T/m iterates between them: 2 √(T |w| |graph|) bytes, the minimum for two runs of every step.
            `Unrolled` takes T |graph| bytes. A number k keeps k iterates and recomputes the others segment by segment,
            with a third run of every step: k + T/k iterates and the graph of a group.
        group_bytes: record steps together while their graph takes less than this. Below 64 MB, saving memory costs more
            time than it is worth. 0 replays every step by itself; "sqrt" is then k = √T, with the least memory and a
            third run of every step.
        memory: how much the memory of the process may grow, in bytes or as "2GB". All iterates are kept if they fit;
            else more steps are recorded together, in groups; else iterates are computed again by binomial
            checkpointing, which needs about log₂ T of them. `stats.plan` says what was chosen and how much memory it is
            predicted to take, `stats.steps` how many steps were run. The workspace of a step is measured once per
            problem. The comparison of derivatives with differences, at the first call, is not included: it takes about
            30 numbers per weight, and `Problem(check_derivatives=False)` leaves it out.
    """

    checkpoints: int | str | None = None
    group_bytes: int = GROUP_BYTES
    memory: int | str | None = None

    def check(self, process: Process) -> None:
        if self.memory is not None:
            as_bytes(self.memory)
            if self.checkpoints is not None:
                raise BilevelError(
                    f"Reverse(checkpoints={self.checkpoints!r}, memory={self.memory!r}) asks for two plans. Pass one."
                )
        if self.checkpoints in (None, "sqrt") or (isinstance(self.checkpoints, int) and self.checkpoints >= 1):
            return
        raise BilevelError(
            f"Reverse(checkpoints={self.checkpoints!r}) is not possible: pass None, a number ≥ 1, or 'sqrt'."
        )

    def __call__(self, process: Process) -> Hypergradient:
        with torch.no_grad():
            start = process.bound.start()
        state_bytes, recorded = trees.nbytes(start), process.recorded_bytes(start)
        group, kept, plan = self._plan(process, state_bytes, recorded)
        groups = split_from_the_end(process.times, group)
        steps = most_held = 0

        @torch.no_grad()
        def run(state: State, first: int, last: int) -> State:
            nonlocal steps
            steps += sum(map(len, groups[first:last]))
            return advance(process, state, groups[first:last])

        sweep: Sweep | None = None
        for index, state, held in backwards(len(groups), kept or len(groups), start, run):
            most_held = max(most_held, held)
            if sweep is None:
                sweep = Sweep(process, state, groups[index])
            else:
                sweep.through(state, groups[index])
        if sweep is None:
            sweep = Sweep(process, start)
        sweep.through_start()
        return self._finish(process, sweep, steps, most_held * state_bytes + group_bytes(groups, recorded), plan)

    def _plan(self, process: Process, state_bytes: int, recorded: int) -> tuple[int, int | None, Plan | None]:
        """How many steps are recorded together, how many iterates are kept (None: all), and the plan for `memory`.

        A state takes `state_bytes`, and the graph of a step `recorded` without its nodes.
        """
        size = group_size(self.group_bytes, recorded)
        if self.memory is not None and process.steps:
            sizes = self.sizes(process)
            plan = sizes.plan(as_bytes(self.memory), size)
            if plan.steps > MANY_RUNS * process.steps:
                warnings.warn(
                    f"Reverse(memory={self.memory!r}) runs {plan.steps:,} steps for T = {process.steps:,}. With "
                    f"{format_bytes(sizes.memory(1, sizes.logarithm))} it would run "
                    f"{runs(process.steps, sizes.logarithm):,}.",
                    BilevelWarning,
                    stacklevel=3,
                )
            return plan.group, plan.kept, plan
        if self.checkpoints == "sqrt" and self.group_bytes > 0:
            # The memory of T/m iterates and m recorded steps is smallest where the two are equal.
            return max(size, round(math.sqrt(process.steps * state_bytes / (NODE_BYTES + recorded)))), None, None
        if self.checkpoints is None or not process.steps:
            return size, None, None
        # k iterates and one segment between two of them.
        groups = math.ceil(process.steps / size)
        count = min(math.isqrt(process.steps) if self.checkpoints == "sqrt" else int(self.checkpoints), groups)
        return size, count - 1 + math.ceil(groups / count), None

    @property
    def saves_memory(self) -> bool:
        """Whether the settings ask for less memory than the defaults."""
        return self.checkpoints is not None or self.memory is not None or self.group_bytes < GROUP_BYTES

    def prepare(self, process: Process) -> tuple[int, int] | None:
        return _measure(process) if self.memory is not None and process.steps else None

    def sizes(self, process: Process) -> Sizes:
        """The sizes in bytes from which a plan for `memory` is made."""
        state, workspace = process.check_results.prepared or _measure(process)
        recorded = NODE_BYTES + process.check_results.graph_bytes + state
        return Sizes(process.steps, state, recorded, workspace + state + trees.nbytes(process.variables))

    def compile(self, process: Process, block: int) -> Callable[[Process], Hypergradient]:
        if self.checkpoints is not None or self.memory is not None:
            raise BilevelError(
                f"{self} cannot be compiled: compiled blocks keep one iterate each. Pass Reverse() without checkpoints "
                "and memory."
            )
        if not process.steps:
            return self
        length = min(block, process.steps)
        blocks = compile_blocks(process, length)

        def run(process: Process) -> Hypergradient:
            # The first steps, which do not fill a block, run eagerly.
            head, rest = process.times[: process.steps % length], process.times[process.steps % length :]
            with torch.no_grad():
                start = process.bound.start()
                borders = blocks.run(process, advance(process, start, [head]), rest)
            memory = trees.nbytes([start, borders])
            sweep = Sweep(process, borders.pop())
            for i in reversed(range(0, len(rest), length)):
                sweep.add(*blocks.pull_back(process, borders.pop(), rest[i : i + length], sweep.alpha))
            if head:
                sweep.through(start, head)
            sweep.through_start()
            return self._finish(process, sweep, process.steps, memory)

        return run

    def _finish(
        self, process: Process, sweep: Sweep, steps: int, memory: int, plan: Plan | None = None
    ) -> Hypergradient:
        costs: dict[str, Any] = {"steps": steps, "replayed": process.steps, "peak_memory": memory, "plan": plan}
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
            cls(memory="1GB"),
            cls(memory=130_000, group_bytes=0),
        ]


class Sweep:
    """The backward half of Algorithm 1: α and p, carried from w_T towards w_0.

    It begins with the last steps, `times`, which are recorded in their first run.
    """

    def __init__(self, process: Process, state: State, times: range = range(0)) -> None:
        self.process = process
        self.value, self.alpha, self.gradients, self.last = process.outer_gradients(state, times)
        # The state that the next replay must reproduce. One comparison is enough to find an impure step.
        self._expected: State | None = state if times else None

    def through(self, state: State, times: range) -> None:
        """Back through the steps `times`, replayed from the state before them."""
        alpha, parts, replayed = steps_vjp(self.process.bound, state, times, self.alpha, self.process.variables)
        self.add(alpha, parts)
        if self._expected is not None:
            refuse_impure(self._expected, replayed, f"Step {times[-1]} gave another result")
            self._expected = None

    def through_start(self) -> None:
        self.add(self.alpha, start_vjp(self.process.bound, self.alpha, self.process.variables))

    def add(self, alpha: list[Tensor | None], parts: Gradients) -> None:
        """Store the adjoint before some steps, and add their contribution to the gradient."""
        self.alpha = alpha
        self.gradients = [accumulate(total, part) for total, part in zip(self.gradients, parts, strict=True)]


def advance(process: Process, state: State, groups: list[range]) -> State:
    """The state after all steps of the groups."""
    for times in groups:
        for t in times:
            state = process.bound.step(state, t)
    return state


def _measure(process: Process) -> tuple[int, int]:
    """The bytes of a state, and the peak that is allocated while one step is recorded and differentiated."""
    bound, first = process.bound, process.times[:1]
    with torch.no_grad():
        state = bound.start()
        # Some dynamics make their auxiliary variables in the first step.
        after = bound.step(state, first[0])
    alpha = [torch.ones_like(x) if trees.is_variable(x) else None for x in trees.leaves(after)]
    workspace = allocated(lambda: steps_vjp(bound, state, first, alpha, process.variables))
    return trees.nbytes(after), NODE_BYTES + workspace


def group_size(group_bytes: int, recorded: int) -> int:
    """How many steps are recorded at a time, if the graph of one takes `recorded` bytes without its nodes."""
    return max(1, group_bytes // (NODE_BYTES + recorded))


def group_bytes(groups: list[range], recorded: int) -> int:
    """The bytes of the graph of the largest group, without the one step that every method records."""
    return max((len(group) - 1 for group in groups), default=0) * recorded


def split_from_the_end(items: range, size: int) -> list[range]:
    """Consecutive pieces of `size`, of which the first may be shorter.

    >>> split_from_the_end(range(1, 6), 2)
    [range(1, 2), range(2, 4), range(4, 6)]
    """
    short = len(items) % size
    return ([items[:short]] if short else []) + [items[i : i + size] for i in range(short, len(items), size)]
