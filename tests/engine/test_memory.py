"""What has been checked is remembered outside the problem, within bounds, and no longer than the problem lives."""

import gc
import pickle
import weakref
from dataclasses import FrozenInstanceError, fields

import pytest
import torch

import bilevel as bl
from bilevel.engine import memory
from bilevel.engine.memory import CAPACITY, memory_of


def distance(w, lam, data):
    return ((w - lam) ** 2).sum()


def size(w, lam, data):
    return (w**2).sum()


def start(lam):
    return torch.zeros(lam.shape)


CALL = {"dynamics": bl.GradientDescent(0.1), "steps": 2}


def ask(problem, lam, **more):
    return bl.hypergradient(problem, lam, bl.Task(None, None), **CALL, **more)


def test_a_problem_is_frozen_and_equal_by_its_functions():
    one, two = bl.Problem(distance, size, start), bl.Problem(distance, size, start)
    ask(one, torch.ones(2))
    assert one == two and hash(one) == hash(two) and one != bl.Problem(size, distance, start)
    assert {f.name for f in fields(one)} == set(vars(one)), "a call has left something on the problem"
    assert pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(FrozenInstanceError):
        one.inner = size


def test_calls_of_one_kind_are_checked_once(monkeypatch):
    calls = []

    def counted(w, lam, data):
        calls.append(1)
        return distance(w, lam, data)

    problem = bl.Problem(counted, size, start)
    ask(problem, torch.ones(2))
    first = len(calls)
    ask(problem, torch.zeros(2))
    again = len(calls) - first
    assert again < first
    ask(problem, torch.zeros(3))
    assert len(calls) - first - again > again, "another shape is another kind of call"


def test_a_memory_is_bounded():
    problem = bl.Problem(distance, size, start)
    for number in range(CAPACITY + 20):
        ask(problem, torch.ones(1 + number))
    kept = memory_of(problem)
    assert len(kept.check_results) == CAPACITY and len(kept.derivatives) <= CAPACITY


def test_a_memory_dies_with_its_problem():
    problem = bl.Problem(distance, lambda w, lam, data: ((w - data) ** 2).sum(), start)
    data = torch.ones(2, requires_grad=True)
    lam = torch.ones(2, requires_grad=True)
    bl.objective(problem, lam, bl.Task(None, data), **CALL).backward()
    assert data.grad is not None and len(memory_of(problem).related) == 1
    key, gone = id(problem), weakref.ref(problem)
    assert key in memory._MEMORIES
    del problem
    gc.collect()
    assert gone() is None and key not in memory._MEMORIES


def test_a_failed_check_is_not_remembered():
    broken = True
    problem = bl.Problem(lambda w, lam, data: distance(w, lam.detach() if broken else lam, data), size, start)
    for _ in range(2):
        with pytest.raises(bl.BilevelError):
            ask(problem, torch.ones(2))
    broken = False
    assert float(ask(problem, torch.ones(2)).grad.norm()) > 0
