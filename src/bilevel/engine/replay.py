"""Which iterates to keep when steps are differentiated from the last to the first, and which to compute again.

The T steps form N groups. A group is recorded as a whole, from the state before it. With s states in memory, the first
included, binomial checkpointing (Griewank and Walther, 2000) runs the fewest steps: if r is the smallest number with
C(s + r, s) ≥ N, no group is run more than r times before it is recorded, and all together r N − C(s + r, r − 1) times.
With s = N that is N − 1 runs: every state is kept, and nothing is run again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from bilevel.errors import BilevelError

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
# The memory of a process grows by more than its tensors take, because freed tensors leave gaps. On a network of 10⁷
# weights it grew by 1.3 to 2.14 times as much.
FRAGMENTATION = 2.25


@dataclass(frozen=True)
class Plan:
    """How `Reverse(memory=…)` divides its memory.

    Attributes:
        kind: "all iterates", "balanced groups" (more steps are recorded together, so that fewer iterates are kept), or
            "binomial" (iterates are computed again).
        group: how many steps are recorded together.
        kept: how many iterates are in memory at most, the start included.
        steps: how many steps are run without being recorded, at most.
        memory: the bytes by which the process is predicted to grow: iterates, recorded steps, the workspace to
            differentiate one, and 1.25 times as much for the gaps that freed tensors leave.
    """

    kind: Literal["all iterates", "balanced groups", "binomial"]
    group: int
    kept: int
    steps: int
    memory: int

    def __str__(self) -> str:
        return (
            f"{self.kind}: {self.kept:,} kept, {self.group:,} recorded together, {self.steps:,} steps before they are "
            f"recorded, {format_bytes(self.memory)}"
        )


@dataclass(frozen=True)
class Sizes:
    """The sizes of a run that a plan depends on, in bytes: a state, the graph of a recorded step, and what every plan
    needs, namely the adjoint, the gradient, and the workspace to record and differentiate one step."""

    steps: int
    state: int
    graph: int
    fixed: int

    def memory(self, group: int, kept: int) -> int:
        """The bytes of `kept` states, the state that a group starts from, and the group."""
        return math.ceil(FRAGMENTATION * (self.fixed + (kept + 1) * self.state + (group - 1) * self.graph))

    def room(self, group: int, budget: int) -> int:
        """How many states fit into the budget beside a recorded group."""
        return math.floor((budget - self.memory(group, 0)) / (FRAGMENTATION * self.state))

    def plan(self, budget: int, preferred: int) -> Plan:
        """The plan that runs the fewest steps within the budget.

        Args:
            budget: bytes.
            preferred: how many steps are recorded together if memory does not matter.
        """
        preferred = max(1, min(preferred, self.steps))
        keep_all = [g for g in self._groups(preferred) if self.room(g, budget) >= math.ceil(self.steps / g)]
        if keep_all:
            # Smaller groups stay in the cache, larger ones mean fewer calls; neither changes the number of steps.
            group = min(keep_all, key=lambda g: abs(math.log(g / preferred)))
            count = math.ceil(self.steps / group)
            kind: Literal["all iterates", "balanced groups"] = (
                "all iterates" if group <= preferred else "balanced groups"
            )
            return Plan(kind, group, count, self.steps - group, self.memory(group, count))
        plans = []
        for group in self._groups(preferred):
            kept, count = self.room(group, budget), math.ceil(self.steps / group)
            if kept >= 1:
                plans.append(Plan("binomial", group, kept, group * runs(count, kept), self.memory(group, kept)))
        if not plans:
            least = self.memory(1, 1)
            raise BilevelError(
                f"Reverse(memory={budget:,}) is too little for any plan: the least that works here is {least:,} bytes "
                f"({format_bytes(least)}), for two states of {format_bytes(self.state)}, the workspace of one step and "
                f"its derivative, {format_bytes(self.fixed)}, and 1.25 times as much for the gaps that freed tensors "
                f"leave. With so little, {runs(self.steps, 1):,} steps would be run; "
                f"{format_bytes(self.memory(1, self.logarithm))} are a better choice."
            )
        return min(plans, key=lambda plan: (plan.steps, plan.memory))

    @property
    def logarithm(self) -> int:
        """log₂ T + 1, the number of states with which no step is run more than about log₂ T times."""
        return max(1, math.ceil(math.log2(max(self.steps, 1)))) + 1

    def _groups(self, preferred: int) -> list[int]:
        """Sizes of groups to try: small ones, powers of 2, the preferred one, and the one that needs the least memory
        for all iterates."""
        balanced = round(math.sqrt(self.steps * self.state / self.graph))
        tried = [*range(1, 32), *(2**i for i in range(self.steps.bit_length())), preferred, balanced]
        return sorted({min(max(1, g), self.steps) for g in tried})


def backwards(
    count: int, kept: int, start: Any, advance: Callable[[Any, int, int], Any]
) -> Iterator[tuple[int, Any, int]]:
    """For group `count` − 1 to group 0: its index, the state before it, and the number of states in memory.

    Args:
        count: N, the number of groups.
        kept: how many states may be kept, the start included. One more is in memory while a group is recorded, if none
            of those kept is the state before it.
        start: the state before group 0.
        advance: `advance(state, i, j)` is the state before group j, from the state before group i.

    >>> seen = [(index, state) for index, state, _ in backwards(5, 2, 0, lambda state, i, j: state + j - i)]
    >>> seen == [(4, 4), (3, 3), (2, 2), (1, 1), (0, 0)]
    True
    """
    stack = [(0, start)]
    for index in reversed(range(count)):
        position, state = stack[-1]
        while position < index:
            free = kept - len(stack)
            target = position + split(index + 1 - position, free + 1) if free > 0 else index
            state, position = advance(state, position, target), target
            if free > 0:
                stack.append((position, state))
        held = len(stack) + (stack[-1][0] != index)
        if stack[-1][0] == index:
            stack.pop()
        yield index, state, held


def repetitions(count: int, kept: int) -> int:
    """r, the largest number of times that a group is run before it is recorded."""
    r = 0
    while math.comb(kept + r, kept) < count:
        r += 1
    return r


def runs(count: int, kept: int) -> int:
    """The smallest total number of runs of groups before they are recorded, with `kept` states in memory.

    >>> runs(100, 100), runs(100, 5), runs(100, 1)
    (99, 316, 4950)
    """
    if kept == 1:
        return count * (count - 1) // 2
    r = repetitions(count, kept)
    return r * count - math.comb(kept + r, r - 1) if r else 0


def split(count: int, kept: int) -> int:
    """The number of groups, out of `count`, after which the next state is kept, if `kept` states may be."""
    r = repetitions(count, kept)
    return min(math.comb(kept + r - 1, kept), count - math.comb(kept + r - 2, kept - 1))


def as_bytes(memory: Any) -> int:
    """A number of bytes, or one with a unit: "2GB", "512 MiB".

    >>> as_bytes("2GB"), as_bytes("0.5 KiB"), as_bytes(10)
    (2000000000, 512, 10)
    """
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([kmgt]?)(i?)b?\s*", memory.lower())
        if match and not (match[3] and not match[2]):
            unit = 1024 ** "kmgt".index(match[2]) * 1024 if match[3] else UNITS[match[2]]
            memory = int(float(match[1]) * unit)
    if isinstance(memory, bool) or not isinstance(memory, int) or memory <= 0:
        raise BilevelError(
            f"Reverse(memory={memory!r}) is not an amount of memory. Pass a number of bytes, or a text such as '2GB' "
            "or '512 MiB'."
        )
    return memory


def format_bytes(size: float) -> str:
    """A number of bytes as text.

    >>> format_bytes(2_340_000)
    '2.34 MB'
    """
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
