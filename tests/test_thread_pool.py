"""Work on several threads: the same results in the same order, errors, and what torch is left with."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from bilevel.thread_pool import map_in_threads, one_thread


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_results_come_in_order_and_from_several_threads(two_threads):
    barrier = threading.Barrier(2, timeout=20)  # two pieces must be under way at once to pass it

    def work(n):
        barrier.wait()
        time.sleep(0.02 * (n % 2))
        return n, threading.get_ident(), torch.get_num_threads()

    numbers, threads, counts = zip(*map_in_threads(work, range(6)), strict=True)
    assert numbers == tuple(range(6))
    assert len(set(threads)) == 2 and threading.get_ident() not in threads
    assert set(counts) == {1}
    assert torch.get_num_threads() == 2


def test_one_thread_or_one_item_stays_here(two_threads):
    assert list(map_in_threads(lambda n: threading.get_ident(), [1])) == [threading.get_ident()]
    with one_thread():
        assert set(map_in_threads(lambda n: threading.get_ident(), [1, 2])) == {threading.get_ident()}
    assert torch.get_num_threads() == 2


def test_inside_there_are_no_more_threads(two_threads):
    def outer(n):
        return threading.get_ident(), set(map_in_threads(lambda m: threading.get_ident(), [1, 2]))

    for thread, inner in map_in_threads(outer, [1, 2, 3]):
        assert inner == {thread}


def test_an_error_is_raised_and_the_rest_is_not_begun(two_threads):
    begun = []

    def work(n):
        begun.append(n)
        if n == 0:
            raise ValueError("the first")
        time.sleep(0.05)

    with pytest.raises(ValueError, match="the first"):
        list(map_in_threads(work, range(50)))
    assert len(begun) < 10
    assert torch.get_num_threads() == 2


def test_who_stops_listening_leaves_nothing_running(two_threads):
    running = threading.Semaphore(0)

    def work(n):
        time.sleep(0.02)
        running.release()
        return n

    results = map_in_threads(work, range(50))
    assert next(results) == 0
    results.close()
    done = running._value
    time.sleep(0.1)
    assert running._value == done < 10
    assert torch.get_num_threads() == 2


def test_results_do_not_pile_up(two_threads):
    made = []

    def work(n):
        made.append(n)
        return n

    results = map_in_threads(work, range(100))
    assert next(results) == 0
    time.sleep(0.1)
    assert len(made) <= 5
    assert list(results) == list(range(1, 100))


def test_a_single_item_has_one_thread_too(two_threads):
    assert list(map_in_threads(lambda n: torch.get_num_threads(), [1])) == [1]
    assert torch.get_num_threads() == 2


def test_the_pool_has_the_size_that_was_asked_for_and_torch_keeps_its_threads(two_threads):
    meeting = threading.Barrier(3, timeout=60)
    assert sorted(map_in_threads(lambda n: meeting.wait(), range(3), threads=3)) == [0, 1, 2]
    assert torch.get_num_threads() == 2
    assert set(map_in_threads(lambda n: threading.get_ident(), range(4), threads=1)) == {threading.get_ident()}
