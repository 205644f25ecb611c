"""Several processes under torchrun: how work is shared, and how results are combined.

`world()` gives the processes that torchrun started. `alone()` is for scripts whose processes solve different problems.
"""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from bilevel.errors import BilevelError, DivergenceError

Item = TypeVar("Item")
Result = TypeVar("Result")
# Numbers the worlds of this process. All processes of a run create the same number of them.
_worlds = count()
# The classes of errors that processes send to each other, as indices into this list.
KINDS: tuple[type[BilevelError], ...] = (BilevelError, DivergenceError)
# The number of the item whose work failed, the kind of the error, and its message.
_Failure: TypeAlias = tuple[int, int, str]
ENDED = "Another process of this run has ended, or did not answer in time, so this one ends too."
_current: ContextVar[World | None] = ContextVar("the processes that work together", default=None)


@dataclass(frozen=True)
class World:
    """The processes that work together, or a single one.

    >>> World(rank=1, size=2).share(range(5))
    [1, 3]
    """

    rank: int = 0
    size: int = 1

    @property
    def device(self) -> torch.device:
        """Where this process computes: on a GPU of its own if the machine has any."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())

    @property
    def writes(self) -> bool:
        """Whether this is the one process that writes files and prints."""
        return self.rank == 0

    def share(self, items: Sequence[Item]) -> list[Item]:
        """The items that this process works on."""
        return list(items[self.rank :: self.size])

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            with _connected():
                dist.all_reduce(tensor)
        return tensor

    def any(self, mine: bool) -> bool:
        """Whether `mine` is true on any process."""
        return mine if self.size == 1 else bool(self.sum(torch.tensor(int(mine), device="cpu")))

    def everyone(self, mine: Item) -> list[Item]:
        """The values that all processes passed, by rank, bit for bit. They are sent as pickles."""
        found: list[Any] = [mine]
        if self.size > 1:
            found = [None] * self.size
            with _connected():
                dist.all_gather_object(found, mine)
            found[self.rank] = mine
        return found

    def from_first(self, value: Any = None) -> Any:
        """The value that rank 0 passed. It is sent as a pickle."""
        values = [value]
        if self.size > 1:
            with _connected():
                dist.broadcast_object_list(values, src=0)
        return values[0]

    def same(self, mine: Any, advice: str) -> None:
        """Raise an error with the advice unless all processes passed the same value."""
        if any(other != mine for other in self.everyone(mine)):
            raise BilevelError(
                f"{advice} Every process of torchrun runs the same script: seed all random numbers alike. If each "
                "process is to solve a problem of its own, write `with bilevel.distributed.alone():` around the "
                "call."
            )

    def collect(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """`work` of every item, in their order, computed by all processes together.

        Results are the same, bit for bit, for any number of processes. An error of one is raised on all of them.
        """
        if self.size == 1:
            return [work(item) for item in items]
        mine: list[Result] = []
        error: BilevelError | None = None
        numbers = self.share(range(len(items)))
        with alone():
            try:
                for number in numbers:
                    mine.append(work(items[number]))
            except BilevelError as caught:
                error = caught
        failed = None if error is None else (numbers[len(mine)], _kind(error), str(error))
        found = self.everyone((mine, failed))
        _raise_first(error, failed, [where for _, where in found])
        return [found[i % self.size][0][i // self.size] for i in range(len(items))]

    def gather(self, mine: Iterable[Tensor], count: int, like: Tensor) -> Iterable[Tensor]:
        """Items 0…count − 1 in order, of which `mine` are this process's share; all are shaped like `like`.

        Their sum is then the same, bit for bit, for any number of processes. A sum of each process's sum would be
        rounded differently, and Adam amplifies rounding differences where a gradient is nearly zero. An error of one
        process is raised on all of them.
        """
        if self.size == 1:
            return mine  # one at a time, to save memory
        # Each process sends as many rows as the first one has. The last number of the first row says whether it failed,
        # which saves a second message.
        own = like.new_zeros((-(-count // self.size), like.numel() + 1))
        error: BilevelError | None = None
        numbers, done = self.share(range(count)), 0
        try:
            for row, item in zip(own[: len(numbers)], mine, strict=True):
                row[:-1].copy_(item.reshape(-1))
                done += 1
        except BilevelError as caught:
            error = caught
            own[0, -1] = 1
        tables = [torch.empty_like(own) for _ in range(self.size)]
        with _connected():
            dist.all_gather(tables, own)
        if any(bool(table[0, -1]) for table in tables):
            failed = None if error is None else ((*numbers, count)[done], _kind(error), str(error))
            _raise_first(error, failed, self.everyone(failed))
        return [tables[number % self.size][number // self.size, :-1].view(like.shape) for number in range(count)]

    def total(self, work: Callable[[int], Tensor], count: int, like: Tensor) -> Tensor:
        """work(0) + … + work(count − 1), computed by all processes together; all terms are shaped like `like`.

        Terms are added in pairs, pairs of pairs, and so on, so the sum is the same, bit for bit, for any number of
        processes. If that number is a power of two, each process sends a single partial sum.

        >>> World().total(lambda i: torch.tensor(float(i)), 4, torch.tensor(0.0))
        tensor(6.)
        """
        ranges = _ranges(0, count, self.size)

        def single(first: int, last: int) -> Tensor | None:
            return work(first) if last - first == 1 else None

        mine = (_pairwise_sum(single, first, last) for first, last in self.share(ranges))
        sums = dict(zip(ranges, self.gather(mine, len(ranges), like), strict=True))
        return _pairwise_sum(lambda first, last: sums.get((first, last)), 0, count)

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Raise an error that occurs inside the block on one process on all of them, so that none waits forever."""
        error: BilevelError | None = None
        try:
            yield
        except BilevelError as caught:
            error = caught
        raised = torch.zeros(len(KINDS), dtype=torch.long, device="cpu")
        if error is not None:
            raised[_kind(error)] = 1
        self.sum(raised)
        if error is not None:
            raise error
        if raised.any():
            kind = KINDS[int(raised.nonzero().max())]
            raise kind("Another process of this run cannot go on. See the log of that process for the reason.")


def _ranges(first: int, last: int, processes: int) -> list[tuple[int, int]]:
    """The terms first…last − 1 of a pairwise sum, cut where the sum is: a range for each process if their number is a
    power of two, otherwise smaller ranges.

    >>> _ranges(0, 6, 2), _ranges(0, 3, 3)
    ([(0, 3), (3, 6)], [(0, 1), (1, 2), (2, 3)])
    """
    if processes == 1 or last - first == 1:
        return [(first, last)]
    middle, fewer = (first + last) // 2, processes // 2 if processes % 2 == 0 else processes
    return _ranges(first, middle, fewer) + _ranges(middle, last, fewer)


def _pairwise_sum(known: Callable[[int, int], Tensor | None], first: int, last: int) -> Tensor:
    """The sum of the terms first…last − 1: `known(first, last)`, or the sums of both halves if that is None."""
    found, middle = known(first, last), (first + last) // 2
    return _pairwise_sum(known, first, middle) + _pairwise_sum(known, middle, last) if found is None else found


def _raise_first(mine: BilevelError | None, failed: _Failure | None, failures: list[_Failure | None]) -> None:
    """Raise the error that a single process would have met first, if there is one."""
    found = [failure for failure in failures if failure is not None]
    if found:
        first = min(found)
        raise mine if mine is not None and first == failed else KINDS[first[1]](first[2])


def _kind(error: BilevelError) -> int:
    """The index of the most specific class in `KINDS` that the error belongs to."""
    return max(place for place, kind in enumerate(KINDS) if isinstance(error, kind))


@contextmanager
def _connected() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise BilevelError(ENDED) from error


@contextmanager
def alone() -> Iterator[World]:
    """Within the block, this process works by itself, and `world()` gives this process only.

    >>> with alone(), world() as everybody:
    ...     everybody
    World(rank=0, size=1)
    """
    before = _current.set(World())
    try:
        yield World()
    finally:
        _current.reset(before)


@contextmanager
def world(timeout: timedelta = timedelta(minutes=10)) -> Iterator[World]:
    """The processes that work together: those of an enclosing `world()` or `alone()`, those of a process group that the
    script made, those that torchrun started, or this one alone."""
    enclosing = _current.get()
    if enclosing is None and dist.is_available() and dist.is_initialized():
        enclosing = World(dist.get_rank(), dist.get_world_size())
    size = os.environ.get("WORLD_SIZE", "1")
    if enclosing is not None or size == "1":
        yield enclosing or World()
        return
    # torch.optim imports torch._dynamo when it is first used. If that happens while a process group exists, the threads
    # of the group survive its destruction, and one that is still running when the interpreter ends aborts the process.
    with suppress(ImportError):
        importlib.import_module("torch._dynamo")
    try:
        store, rank, processes = next(rendezvous("env://", timeout=timeout))
        # torchrun keeps its store over a restart, with the addresses of processes that have ended. A prefix for every
        # start, and for every world of a process, keeps these addresses apart.
        store = dist.PrefixStore(f"start {_restarts()}.{next(_worlds)}", store)  # type: ignore[attr-defined]
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=processes, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise BilevelError(f"The {size} processes of WORLD_SIZE could not connect to each other: {error}") from error
    before = _current.set(World(rank, processes))
    try:
        yield World(rank, processes)
    finally:
        _current.reset(before)
        dist.destroy_process_group()


def current_world() -> World:
    """The processes of the enclosing `world()`; this one alone outside of any."""
    return _current.get() or World()


def writes() -> bool:
    """Whether this is the one process that writes files and prints. It may be called before there is a `World`."""
    return os.environ.get("RANK", "0") == "0"


def launch() -> str | None:
    """The call of torchrun that this process belongs to, the same before and after a restart; None without torchrun."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    # torchrun calls a run "none" when it was given no name. The parent process then identifies it.
    return f"{socket.gethostname()} {os.getppid()}" if name == "none" else name


def restarted() -> bool:
    """Whether torchrun started this process again after another one died."""
    return _restarts() > 0


def _restarts() -> int:
    text = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if not text.isdecimal():
        raise BilevelError(
            f"TORCHELASTIC_RESTART_COUNT={text} is not a whole number. Unset it, or start with torchrun."
        )
    return int(text)
