"""Inner objectives that draw random numbers without a seed: several evaluations would mix several draws."""

import pytest
import torch
from comparing import classification, right_or_refused, zeros
from torch import nn

import bilevel as bl


@pytest.mark.parametrize(
    "method",
    [bl.Reverse(2, group_bytes=0), bl.Implicit(), bl.Implicit(bl.Direct())],
    ids=["Reverse from few checkpoints", "Implicit", "Implicit, directly"],
)
def test_dropout_without_a_seed(method):
    """Methods that evaluate a step or an objective more than once would mix several draws."""
    task, lam = classification(12, 3), torch.tensor([-1.0, 0.0, 0.5])
    error = lambda w, x, y: nn.functional.softplus(-(2 * y - 1) * (x @ w)).mean()  # noqa: E731
    inner = lambda w, lam, data: (  # noqa: E731
        error(w, nn.functional.dropout(data[0], 0.5), data[1]) + 0.5 * (lam.exp() * w**2).sum()
    )
    problem = bl.Problem(inner, lambda w, lam, data: error(w, *data), zeros(3))

    def ask():
        return bl.hypergradient(problem, lam, task, dynamics=bl.GradientDescent(0.5), steps=8, method=method).grad

    try:
        first = ask()
    except bl.BilevelError:
        return
    right_or_refused(ask, first)
