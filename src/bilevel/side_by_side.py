"""Independent pieces of work on all of torch's threads, one piece to a thread.

Two threads inside an operation on small tensors gain little; two pieces side by side, with one thread each, gain nearly
a factor of two. Torch lets go of Python's lock while it computes, so threads suffice.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """work(item) of every item, in their order, with the threads that torch was given (`torch.set_num_threads`).

    What an item's result is does not depend on the number of threads or of items, because each has one thread to
    itself. An error of any item is raised here. Inside of `work`, side_by_side takes one item after the other. Results
    wait for those before them, so a few are in memory at a time. Who leaves the loop early should close the iterator.

    >>> list(side_by_side(lambda n: n * n, [1, 2, 3]))
    [1, 4, 9]
    """
    threads = torch.get_num_threads()
    with one_thread():
        if min(threads, len(items)) <= 1:
            yield from map(work, items)
            return
        pool, left, under_way = _pool(threads), iter(items), deque[Future[Result]]()

        def begin() -> None:
            under_way.extend(pool.submit(_alone, work, item) for item in islice(left, 1))

        try:
            for _ in range(2 * threads):
                begin()
            while under_way:
                yield under_way.popleft().result()
                begin()
        finally:
            for future in under_way:
                future.cancel()
            wait(under_way)


def _alone(work: Callable[[Item], Result], item: Item) -> Result:
    torch.set_num_threads(1)  # the number is a thread's own, and in part everybody's
    return work(item)


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside the block, torch's operations have one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@lru_cache(None)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="bilevel")


# A forked process has none of its parent's threads.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)
