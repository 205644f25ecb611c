"""Several processes under torchrun: who computes what, and sums over all of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Item = TypeVar("Item")


@dataclass(frozen=True)
class World:
    """The processes that work together; a single one is a world too.

    >>> World(rank=1, size=2).share(range(5))
    [1, 3]
    """

    rank: int = 0
    size: int = 1

    @property
    def writes(self) -> bool:
        """Whether this is the one process that writes files and prints."""
        return self.rank == 0

    def share(self, items: Sequence[Item]) -> list[Item]:
        """Which of the items are this process's work."""
        return list(items[self.rank :: self.size])

    def sum(self, tensors: list[Tensor]) -> list[Tensor]:
        """The sum of each tensor over all processes, in one message."""
        if self.size == 1:
            return tensors
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat)
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]

    def wait(self) -> None:
        """Until everybody is here."""
        if self.size > 1:
            dist.barrier()


@contextmanager
def world(timeout: timedelta = timedelta(minutes=10)) -> Iterator[World]:
    """The processes that torchrun started, or this one alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield World()
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timeout)
    try:
        yield World(dist.get_rank(), size)
    finally:
        dist.destroy_process_group()


def restarted() -> bool:
    """Whether torchrun started this process again after another one died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
