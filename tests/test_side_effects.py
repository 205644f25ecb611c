"""No library call changes the user's process: allocator, threads, standard output, default dtype, warnings."""

import ctypes
import sys
import warnings

import pytest
import torch

import bilevel as bl

PROBLEM = bl.Problem(
    inner=lambda w, lam, data: ((data @ w - 1) ** 2).mean() + lam.exp() * (w**2).sum(),
    outer=lambda w, lam, data: ((data @ w - 1) ** 2).mean(),
    init=lambda lam: torch.zeros(3, dtype=lam.dtype),
)
SETTINGS = {"dynamics": bl.GradientDescent(lr=0.1), "steps": 5}


def task():
    return bl.Task(torch.randn(6, 3), torch.randn(6, 3))


def few_shot():
    learner = bl.HyperRepresentation("omniglot-net", shape=(1, 28, 28), steps=2)
    images, labels = torch.rand(3, 4, 1, 28, 28), torch.tensor([0, 1, 0, 1]).expand(3, -1)
    episodes = bl.Task((images, labels), (images, labels))
    learner.hypergradient(episodes)
    learner.accuracies(episodes, steps=2)


CALLS = {
    "hypergradient": lambda: bl.hypergradient(PROBLEM, torch.zeros(()), task(), **SETTINGS),
    "objective": lambda: bl.objective(PROBLEM, torch.zeros((), requires_grad=True), task(), **SETTINGS).backward(),
    "certify": lambda: bl.certify(PROBLEM, torch.zeros(()), task(), **SETTINGS),
    "solve": lambda: bl.solve(PROBLEM, torch.zeros(()), task(), iterations=2, **SETTINGS),
    "few-shot": few_shot,
}


@pytest.mark.parametrize("call", CALLS)
def test_a_library_call_leaves_the_process_as_it_was(call, monkeypatch, capfd):
    def loaded(name, *rest, **options):
        assert name is not None, "the C library was opened, as mallopt needs it"
        return found(name, *rest, **options)

    found = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", loaded)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        state = torch.get_default_dtype(), warnings.showwarning, sys.stdout, torch.is_grad_enabled()
        CALLS[call]()
        assert torch.get_num_threads() == 2
        assert state == (torch.get_default_dtype(), warnings.showwarning, sys.stdout, torch.is_grad_enabled())
        assert capfd.readouterr().out == ""
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("method", [bl.Reverse(), bl.Unrolled(), bl.Forward(), bl.Implicit(), bl.Truncated(3)])
def test_a_solution_that_is_changed_in_place_changes_no_later_run(method):
    problem = bl.Problem(
        lambda w, lam, x: ((w["a"] - x) ** 2 + lam.exp() * w["a"] ** 2).sum(),
        lambda w, lam, x: ((w["a"] - x) ** 2).sum(),
        lambda lam: {"a": torch.zeros(3)},
    )
    task, settings = bl.Task(torch.ones(3), torch.ones(3)), {"dynamics": bl.HeavyBall(0.1, 0.5), "method": method}
    first = bl.hypergradient(problem, torch.zeros(()), task, steps=4, **settings)
    expected = bl.hypergradient(problem, torch.zeros(()), task, steps=4, start=first, **settings)
    first.inner["a"].zero_()
    again = bl.hypergradient(problem, torch.zeros(()), task, steps=4, start=first, **settings)
    assert torch.equal(again.value, expected.value) and torch.equal(again.grad, expected.grad)
