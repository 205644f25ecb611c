"""Derivatives that the inner objective hides on later batches only."""

import pytest
import torch

import bilevel as bl

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = X @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
LAM = torch.zeros(3, dtype=torch.float64)
RUN = {"dynamics": bl.GradientDescent(0.1), "steps": 6}


def problem(inner):
    def outer(w, lam, batch):
        return ((batch[0] @ w - batch[1]) ** 2).mean()

    return bl.Problem(inner, outer, init=lambda lam: torch.zeros(3, dtype=torch.float64))


def penalised(w, lam, x, y, hide):
    errors = x @ w - y
    weight = lam.detach() if hide else lam
    return (errors**2).mean() + (weight.exp() * w**2).sum()


def positional(w, lam, batch):
    """Batches of three parts hide the derivative."""
    return penalised(w, lam, *batch[:2], hide=len(batch) == 3)


def named(w, lam, batch):
    return penalised(w, lam, batch["x"], batch["y"], hide=batch["hide"])


def by_length(w, lam, batch):
    return penalised(w, lam, *batch, hide=len(batch[0]) < 6)


CASES = {
    "every other batch has a third part": (positional, lambda t: (X, Y) if t % 2 else (X, Y, "no"), 2),
    "the second half has a flag": (named, lambda t: {"x": X, "y": Y, "hide": t > 3}, 4),
    "the last batch is shorter": (by_length, lambda t: (X[:4], Y[:4]) if t == 6 else (X[:6], Y[:6]), 6),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_hidden_on_a_later_batch_is_refused(case):
    inner, train, step = CASES[case]
    with pytest.raises(bl.BilevelError, match=f"inner on the batch of step {step} are not what autograd says"):
        bl.hypergradient(problem(inner), LAM, bl.Task(train, (X, Y)), **RUN)


def test_batches_of_several_kinds_that_hide_nothing_are_differentiated():
    def train(t):
        return (X, Y) if t % 2 else (X[:5], Y[:5], "no")

    task = bl.Task(train, (X, Y))
    right = problem(lambda w, lam, batch: penalised(w, lam, *batch[:2], hide=False))
    found = bl.hypergradient(right, LAM, task, **RUN).grad
    move = 1e-6 * torch.eye(3, dtype=torch.float64)
    values = [[float(bl.objective(right, LAM + sign * row, task, **RUN)) for sign in (1, -1)] for row in move]
    differences = torch.tensor([(above - below) / 2e-6 for above, below in values], dtype=torch.float64)
    torch.testing.assert_close(found, differences, rtol=1e-6, atol=1e-9)


def test_a_number_in_the_batch_is_no_other_kind():
    """A batch may hold t as a seed. Comparing every such batch would take several times as long."""
    calls = []

    def count(train):
        calls.clear()

        def inner(w, lam, batch):
            calls.append(1)
            return penalised(w, lam, *batch[:2], hide=False)

        bl.hypergradient(problem(inner), LAM, bl.Task(train, (X, Y)), **RUN)
        return len(calls)

    assert count(lambda t: (X, Y, t)) == count(lambda t: (X, Y, 0))
