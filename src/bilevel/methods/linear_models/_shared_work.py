"""Work inside a method that several processes share: some of the folds, or some blocks of rows.

All processes call the method at the same time with the same arguments, and hold the same state. Each process computes
some of the parts, and all of them exchange the results. So every decision is made on the same numbers, and no process
waits for a message that another one does not send. The parts depend on the size of the work and not on the number of
processes: results are the same, bit for bit, for any number of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from bilevel.distributed import World, alone, current_world

# Work of fewer floating-point operations than this, one or two milliseconds, is not divided further: the exchange of
# results would take too much of the time that this saves.
LEAST_OPERATIONS = 3e7
# A table is cut into one of these numbers of blocks of rows. At most as many processes can share its products.
ROW_BLOCKS = (8, 4, 2, 1)

# Solves A_k x_k = b_k for every fold k, with b and x of the shape folds × … × size.
Solver: TypeAlias = Callable[[Tensor], Tensor]

_shares: ContextVar[bool] = ContextVar("whether processes share the work inside a method", default=False)


@contextmanager
def work_is_shared() -> Iterator[None]:
    """Within the block, the processes of `world()` share the work of every call of a method for linear models.

    All of them must make the same calls in the same order. A single process computes everything itself.
    """
    before = _shares.set(True)
    try:
        yield
    finally:
        _shares.reset(before)


def shared(work: Callable[[int], Tensor], count: int, like: Tensor) -> list[Tensor]:
    """work(0) … work(count − 1), each computed by one of the processes that share the work.

    All results have the shape and dtype of `like`. An error of one process is raised on all of them.
    """
    world = current_world() if _shares.get() else World()
    if world.size == 1 or count == 1:
        return [work(number) for number in range(count)]
    # Inside the work on one item, nothing is shared again.
    with alone():
        return list(world.gather((work(number) for number in world.share(range(count))), count, like))


@dataclass(frozen=True)
class Parts:
    """The parts of some work: slices of an axis of folds or of rows."""

    slices: tuple[slice, ...]

    def each(self, work: Callable[[int], Tensor], like: Tensor) -> list[Tensor]:
        """`work` of the number of every part, in order. All results have the shape and dtype of `like`."""
        return shared(work, len(self.slices), like)

    def sum(self, work: Callable[[int], Tensor], like: Tensor) -> Tensor:
        """The sum of the results, added in the order of the parts."""
        first, *others = self.each(work, like)
        for other in others:
            first = first + other
        return first

    def joined(self, work: Callable[[int], Tensor], like: Tensor) -> Tensor:
        """The results for all folds, which has the shape of `like`, from the results for the folds of each part."""
        found = self.each(work, like[self.slices[0]])
        return found[0] if len(found) == 1 else torch.cat(found)

    def solver(self, make: Callable[[slice], Solver]) -> Solver:
        """A solver for all folds. `make` returns the solver for some folds, and is called when it is first needed."""
        made: dict[int, Solver] = {}

        def solve(right: Tensor) -> Tensor:
            def solved(part: int) -> Tensor:
                here = self.slices[part]
                if part not in made:
                    made[part] = make(here)
                return made[part](right[here])

            return self.joined(solved, torch.empty_like(right))

        return solve


def fold_parts(folds: int, operations: float) -> Parts:
    """One part for each fold if the work takes that many floating-point operations, otherwise one for all folds."""
    if operations < LEAST_OPERATIONS:
        return Parts((slice(0, folds),))
    return Parts(tuple(slice(k, k + 1) for k in range(folds)))


def row_blocks(rows: int, operations: float) -> Parts:
    """Blocks of rows of the same size, but for the last one: as many as the work is worth; one if it is small."""
    count = next((n for n in ROW_BLOCKS if n <= rows and n * LEAST_OPERATIONS <= operations), 1)
    size = -(-rows // count)
    return Parts(tuple(slice(first, min(first + size, rows)) for first in range(0, rows, size)))
