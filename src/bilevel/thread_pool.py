"""A thread pool for independent work on small tensors, with one thread of torch for each item.

Two threads inside one operation on small tensors gain little. Two items at the same time, with one thread each, gain
nearly a factor of two. Torch releases Python's global lock while it computes, so threads suffice.
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


def map_in_threads(
    work: Callable[[Item], Result], items: Sequence[Item], threads: int | None = None
) -> Iterator[Result]:
    """work(item) for every item, in order, computed in a thread pool.

    Torch has one thread inside `work`, so a result depends neither on `threads` nor on the number of items. A nested
    call runs its items one after the other. At most 2·threads results are in memory. The first error of an item is
    raised here. Torch's own number of threads is restored when the iterator ends; call `close()` on the iterator if you
    stop early.

    Args:
        work: called once for every item, from several threads at a time.
        items: what to call it with.
        threads: size of the pool; by default `torch.get_num_threads()`.

    >>> list(map_in_threads(lambda n: n * n, [1, 2, 3]))
    [1, 4, 9]
    """
    threads = torch.get_num_threads() if threads is None else threads
    with one_thread():
        if min(threads, len(items)) <= 1:
            yield from map(work, items)
            return
        pool, waiting, running = _pool(threads), iter(items), deque[Future[Result]]()

        def submit_next() -> None:
            running.extend(pool.submit(_with_one_thread, work, item) for item in islice(waiting, 1))

        try:
            for _ in range(2 * threads):
                submit_next()
            while running:
                yield running.popleft().result()
                submit_next()
        finally:
            for future in running:
                future.cancel()
            wait(running)


def _with_one_thread(work: Callable[[Item], Result], item: Item) -> Result:
    torch.set_num_threads(1)  # OpenMP keeps this number for each thread
    return work(item)


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes with one thread inside the block; the former number is restored after it."""
    with threads(1):
        yield


def thread_count(count: int | None) -> int:
    """The number of threads that scikit-learn's `n_jobs` means: -1 for all processors, None for torch's own number."""
    if count is None:
        return torch.get_num_threads()
    return count if count > 0 else max(1, (os.cpu_count() or 1) + 1 + count)


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Set torch's number of threads to `thread_count(count)` inside the block; the former number is restored."""
    before = torch.get_num_threads()
    torch.set_num_threads(thread_count(count))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@lru_cache(None)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="bilevel")


# A forked process does not inherit its parent's threads, so it needs a new pool.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)
