"""Several processes under torchrun: who computes what, and how their work becomes one."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from bilevel.errors import BilevelError, DivergenceError

Item = TypeVar("Item")
# Numbers the worlds of this process; all processes of a run have as many of them.
_worlds = count()
# What an error becomes on the processes that did not have it; the place in the list is what they tell each other.
KINDS: tuple[type[BilevelError], ...] = (BilevelError, DivergenceError)


@dataclass(frozen=True)
class World:
    """The processes that work together; a single one is a world too.

    >>> World(rank=1, size=2).share(range(5))
    [1, 3]
    """

    rank: int = 0
    size: int = 1

    @property
    def device(self) -> torch.device:
        """Where this process computes: a graphics card of its own if the machine has any."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())

    @property
    def writes(self) -> bool:
        """Whether this is the one process that writes files and prints."""
        return self.rank == 0

    def share(self, items: Sequence[Item]) -> list[Item]:
        """Which of the items are this process's work."""
        return list(items[self.rank :: self.size])

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            try:
                dist.all_reduce(tensor)
            except RuntimeError as error:
                raise BilevelError("Another process of this run has ended, so this one ends too.") from error
        return tensor

    def any(self, mine: bool) -> bool:
        """Whether it is so on any process."""
        return bool(self.sum(torch.tensor(int(mine))))

    def gather(self, mine: Iterable[Tensor], count: int, like: Tensor) -> Iterable[Tensor]:
        """Items 0…count − 1 in order, of which `mine` are this process's share; all are shaped like `like`.

        Their sum is then the same, bit for bit, for any number of processes. A sum of each process's sum would be
        rounded differently, and Adam makes much of a small difference where a gradient is nearly zero.
        """
        if self.size == 1:
            return mine  # one at a time, so that they need not all be in memory
        table = like.new_zeros((count, *like.shape))
        with self.agreed():
            for number, item in zip(self.share(range(count)), mine, strict=True):
                table[number] = item
        return self.sum(table)

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """An error inside the block on one process is an error on all of them, so that nobody waits in vain."""
        error: BilevelError | None = None
        try:
            yield
        except BilevelError as caught:
            error = caught
        told = torch.zeros(len(KINDS), dtype=torch.long)
        if error is not None:
            told[max(place for place, kind in enumerate(KINDS) if isinstance(error, kind))] = 1
        self.sum(told)
        if error is not None:
            raise error
        if told.any():
            raise KINDS[int(told.nonzero().max())]("Another process of this run cannot go on; it has said why.")


@contextmanager
def world(timeout: timedelta = timedelta(minutes=10)) -> Iterator[World]:
    """The processes that torchrun started, or this one alone."""
    size = os.environ.get("WORLD_SIZE", "1")
    if size == "1":
        yield World()
        return
    try:
        store, rank, processes = next(rendezvous("env://", timeout=timeout))
        # torchrun keeps its store over a restart, with the addresses of processes that are no more; a name of its own
        # for every start, and for every world of a process, keeps the new ones from calling them.
        store = dist.PrefixStore(f"start {_restarts()}.{next(_worlds)}", store)  # type: ignore[attr-defined]
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=processes, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise BilevelError(f"The {size} processes of WORLD_SIZE did not find each other: {error}") from error
    try:
        yield World(rank, processes)
    finally:
        dist.destroy_process_group()


def writes() -> bool:
    """Whether this is the one process that writes files and prints, before there is a world to ask."""
    return os.environ.get("RANK", "0") == "0"


def launch() -> str | None:
    """The call of torchrun that this process belongs to, the same before and after a restart; None without torchrun."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    # torchrun calls a run "none" when it was given no name; the process that starts the workers then stands for it.
    return f"{socket.gethostname()} {os.getppid()}" if name == "none" else name


def restarted() -> bool:
    """Whether torchrun started this process again after another one died."""
    return _restarts() > 0


def _restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
