"""Functions that read λ, or another tensor that waits for a gradient, from around them: right or refused.

The reference is f by the same steps, differentiated by central differences.
"""

import pytest
import torch
from comparing import differences, regression, right_or_refused, slope, squares, zeros

import bilevel as bl

TASK = regression(10, 3)
RUN = {"dynamics": bl.GradientDescent(0.2), "steps": 5}


def test_a_rate_read_from_lam_instead_of_the_argument():
    """dynamics=GradientDescent(lam[3]) holds the number of now; the gradient in it is not 0."""
    lam = torch.tensor([-1.0, 0.0, 0.5, -1.5], requires_grad=True)
    inner = lambda w, lam, data: squares(w, lam, data) + 0.5 * (lam[:3].exp() * w**2).sum()  # noqa: E731

    def f(lam):
        w = torch.zeros(3)
        for _ in range(5):
            w = w - lam[3].exp() * slope(lambda w: inner(w, lam, TASK.train), w).grad
        return squares(w, None, TASK.val)

    expected = differences(f, lam.detach()).grad
    problem, dynamics = bl.Problem(inner, squares, zeros(3)), bl.GradientDescent(lam[3].exp())
    right_or_refused(lambda: bl.hypergradient(problem, lam, TASK, dynamics=dynamics, steps=5).grad, expected)


@pytest.mark.parametrize("where", ["inner", "outer", "init"])
def test_a_penalty_read_from_a_closure(where):
    """A function that uses the lam of the script, not its own argument."""
    lam = torch.tensor([-1.0, 0.0, 0.5], requires_grad=True)
    inner = lambda w, lam, data: squares(w, lam, data) + 0.5 * (lam.exp() * w**2).sum()  # noqa: E731
    outer = lambda w, lam, data: squares(w, lam, data) + 0.1 * (lam * w).sum()  # noqa: E731
    init = lambda lam: 0.1 * lam  # noqa: E731
    mistaken = bl.Problem(
        (lambda w, _, data: inner(w, lam, data)) if where == "inner" else inner,
        (lambda w, _, data: outer(w, lam, data)) if where == "outer" else outer,
        (lambda _: init(lam)) if where == "init" else init,
    )

    def f(lam):
        w = init(lam)
        for _ in range(5):
            w = w - 0.2 * slope(lambda w: inner(w, lam, TASK.train), w).grad
        return outer(w, lam, TASK.val)

    expected = differences(f, lam.detach()).grad
    right_or_refused(lambda: bl.hypergradient(mistaken, lam, TASK, **RUN).grad, expected)


def test_another_tensor_that_waits_for_its_gradient():
    """`temperature` requires grad and enters the inner objective: after backward() its .grad must not be missing."""
    lam = torch.tensor([-1.0, 0.0, 0.5], requires_grad=True)
    temperature = torch.tensor(0.3, requires_grad=True)

    def inner(w, lam, data, temperature=temperature):
        return temperature.exp() * squares(w, lam, data) + 0.5 * (lam.exp() * w**2).sum()

    def f(number):
        w = torch.zeros(3)
        for _ in range(5):
            w = w - 0.2 * slope(lambda w: inner(w, lam.detach(), TASK.train, number), w).grad
        return squares(w, None, TASK.val)

    expected = differences(f, temperature.detach()).grad

    def ask():
        bl.objective(bl.Problem(inner, squares, zeros(3)), lam, TASK, **RUN).backward()
        return torch.zeros(()) if temperature.grad is None else temperature.grad

    right_or_refused(ask, expected)


def test_tensors_that_do_not_require_grad_may_come_from_anywhere():
    lam, weights = torch.tensor([-1.0, 0.0, 0.5], requires_grad=True), torch.linspace(0.5, 1.5, 10)

    def inner(w, lam, data):
        return 0.5 * (weights * (data[0] @ w - data[1]) ** 2).mean() + 0.5 * (lam.exp() * w**2).sum()

    def f(lam):
        w = torch.zeros(3)
        for _ in range(5):
            w = w - 0.2 * slope(lambda w: inner(w, lam, TASK.train), w).grad
        return squares(w, None, TASK.val)

    expected = differences(f, lam.detach()).grad
    problem = bl.Problem(inner, squares, zeros(3))
    assert right_or_refused(lambda: bl.hypergradient(problem, lam, TASK, **RUN).grad, expected)
