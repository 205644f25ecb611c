"""Outer loops on minibatches and sources of tasks, in which w is carried from one hyperiteration to the next."""

import pytest
import torch

import bilevel as bl


def test_fixed_batches_are_a_partition_in_every_epoch():
    batches = bl.FixedBatches({"x": torch.arange(12)}, 4, seed=3)
    for epoch in range(3):
        shown = torch.cat([batches(t)["x"] for t in range(3 * epoch + 1, 3 * epoch + 4)])
        assert sorted(shown.tolist()) == list(range(12))
    assert batches[1]["x"].data_ptr() == batches.data["x"][4:].data_ptr()


def ridge():
    torch.manual_seed(0)
    X = torch.randn(40, 3, dtype=torch.float64)
    y = X.sum(1) + torch.randn(40, dtype=torch.float64)
    problem = bl.Problem(
        inner=lambda w, lam, d: ((d[0] @ w - d[1]) ** 2).mean() + (lam.exp() * w**2).sum(),
        outer=lambda w, lam, d: ((d[0] @ w - d[1]) ** 2).mean(),
        init=lambda lam: torch.zeros_like(lam),
    )
    return problem, torch.zeros(3, dtype=torch.float64), (X[:20], y[:20]), (X[20:], y[20:])


@pytest.mark.parametrize("start", ["cold", "warm", "online"])
def test_outer_minibatches_with_a_carried_w_by_hand(start):
    problem, lam, train, val = ridge()
    task = bl.Task(bl.Minibatches(train, 5), bl.Minibatches(val, 5))
    call = {"dynamics": bl.GradientDescent(0.05), "steps": 3}
    found = bl.solve(
        problem, lam, task, iterations=4, start=start, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **call
    )
    before = None
    # An online run ends before it would take more inner steps at the last λ.
    for k in range(3 if start == "online" else 4):
        shift = 3 * k if start == "warm" else 0
        here = bl.Task(lambda t, shift=shift: task.train(t + shift), task.val(k + 1))
        begin = None if start == "cold" or before is None else before.inner if start == "warm" else before
        before = bl.hypergradient(problem, lam, here, start=begin, **call)
        lam = lam - 0.1 * before.grad
    assert torch.allclose(found.outer, lam, rtol=1e-12)


@pytest.mark.parametrize("start", ["warm", "online"])
def test_a_source_of_tasks_carries_w(start):
    problem, lam, train, val = ridge()
    batches, others = bl.Minibatches(train, 10), bl.Minibatches(val, 10)
    call = {"dynamics": bl.GradientDescent(0.05), "steps": 2}
    settings = {"iterations": 3, "start": start, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1), **call}
    found = bl.solve(problem, lam, lambda k: bl.Task(batches(k + 1), others(k + 1)), **settings)
    before = None
    for k in range(2 if start == "online" else 3):
        begin = None if before is None else before.inner if start == "warm" else before
        before = bl.hypergradient(problem, lam, bl.Task(batches(k + 1), others(k + 1)), start=begin, **call)
        lam = lam - 0.1 * before.grad
    assert torch.allclose(found.outer, lam, rtol=1e-12)
    with pytest.raises(bl.BilevelError, match=r"such as task\.val\(1\)"):
        bl.hypergradient(problem, lam, bl.Task(train, others), **call)
    with pytest.raises(bl.BilevelError, match="compares values"):
        bl.solve(problem, lam, bl.Task(train, others), algorithm=bl.LBFGSB(), **call)
