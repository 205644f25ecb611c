"""Inner objectives that are quadratic in pieces: a method for quadratics must be right about them or refuse.

With momentum the iterates cross into another piece and come back, so that both ends of the run look quadratic.
"""

import numpy as np
import pytest
import torch
from comparing import EXACT, agree, classification, close, regression, right_or_refused, slope, zeros

import bilevel as bl


def soft_box(w, lam, data):
    """(w − λ)²/2 with a spring beyond w = 1."""
    return 0.5 * ((w - lam) ** 2).sum() + 20 * (torch.relu(w - 1) ** 2).sum()


def squared_hinge(w, lam, data):
    return 0.5 * (torch.relu(1 - (2 * data[1] - 1) * (data[0] @ w)) ** 2).mean() + 0.5 * lam.exp().sum() * (w**2).sum()


def huber(w, lam, data):
    return torch.nn.functional.huber_loss(data[0] @ w, data[1], delta=0.5) + 0.5 * lam.exp().sum() * (w**2).sum()


def one_sided(w, lam, data):
    """Errors above cost four times those below."""
    error = data[0] @ w - data[1]
    return (torch.where(error > 0, 2.0, 0.5) * error**2).mean() + 0.5 * lam.exp().sum() * (w**2).sum()


def trimmed(w, lam, data):
    """The mean of the squared errors that are not among the largest five."""
    return ((data[0] @ w - data[1]) ** 2).sort().values[:-5].mean() + 0.5 * lam.exp().sum() * (w**2).sum()


def distance_to_an_interval(w, lam, data):
    error = data[0] @ w - data[1]
    return ((error - error.clamp(-0.3, 0.3)) ** 2).mean() + 0.5 * lam.exp().sum() * (w**2).sum()


def spring(w, lam, beyond):
    """The soft bounds again, with a spring that Python switches on."""
    base = 0.5 * ((w - lam) ** 2).sum()
    return base + 20 * ((w - 1) ** 2).sum() if beyond else base


READ_BY_PYTHON = {
    "a branch on a number": lambda w: float(w.detach().max()) > 1,
    "a branch on a tensor": lambda w: (w > 1).any(),
    "a branch on an array": lambda w: w.detach().numpy().max() > 1,
    "a branch on a copied array": lambda w: np.asarray(w.detach()).max() > 1,
    "a branch on a list": lambda w: max(w.tolist()) > 1,
}
REGRESSION, CLASSES = regression(20, 3), classification(20, 3)
CASES = {
    "soft bounds": (soft_box, bl.Task(None, None), torch.full((1,), 0.8), 1),
    "a squared hinge": (squared_hinge, CLASSES, torch.full((1,), -2.0), 3),
    "a Huber loss": (huber, REGRESSION, torch.full((1,), -2.0), 3),
    "one-sided squares": (one_sided, REGRESSION, torch.full((1,), -2.0), 3),
    "trimmed squares": (trimmed, REGRESSION, torch.full((1,), -2.0), 3),
    "a dead zone": (distance_to_an_interval, REGRESSION, torch.full((1,), -2.0), 3),
}
CASES |= {
    name: (lambda w, lam, data, read=read: spring(w, lam, read(w)), bl.Task(None, None), torch.full((1,), 0.8), 1)
    for name, read in READ_BY_PYTHON.items()
}
CASES["a mask without a graph"] = (
    lambda w, lam, data: 0.5 * ((w - lam) ** 2).sum() + 20 * ((w.detach() > 1).double() * (w - 1) ** 2).sum(),
    bl.Task(None, None),
    torch.full((1,), 0.8),
    1,
)
STEPS = 25


def case(name):
    inner, task, lam, size = CASES[name]
    outer = lambda w, lam, data: ((w - 1.5) ** 2).sum()  # noqa: E731

    def plain(lam):
        w, v = torch.zeros(size, requires_grad=True), torch.zeros(size)
        for _ in range(STEPS):
            (g,) = torch.autograd.grad(inner(w, lam, task.train), w, create_graph=True)
            v = 0.9 * v - 0.05 * g
            w = w + v
        return outer(w, lam, None)

    run = {"dynamics": bl.HeavyBall(0.05, 0.9), "steps": STEPS}
    return bl.Problem(inner, outer, zeros(size)), lam, task, run, slope(plain, lam)


@pytest.mark.parametrize("name", CASES)
def test_methods_that_run_the_steps(name):
    problem, lam, task, run, expected = case(name)
    agree(expected, problem, lam, task, methods=(*EXACT, bl.Reversible(), "auto"), tolerance=1e-9, **run)


@pytest.mark.parametrize("name", CASES)
def test_the_method_for_quadratics_is_right_or_refuses(name):
    problem, lam, task, run, expected = case(name)
    method = bl.Spectral()
    right_or_refused(
        lambda: bl.hypergradient(problem, lam, task, method=method, **run).grad, expected.grad, tolerance=1e-8
    )


def test_a_quadratic_is_not_refused():
    """The same run without a second piece."""
    problem = bl.Problem(
        lambda w, lam, data: 0.5 * ((w - lam) ** 2).sum() + 20 * ((w - 1) ** 2).sum(),
        lambda w, lam, data: ((w - 1.5) ** 2).sum(),
        zeros(1),
    )
    run = {"dynamics": bl.HeavyBall(0.02, 0.9), "steps": STEPS}
    lam = torch.full((1,), 0.8)
    found = [
        bl.hypergradient(problem, lam, bl.Task(None, None), method=method, **run).grad
        for method in (bl.Spectral(), bl.Reverse())
    ]
    close(found[0], found[1], 1e-10)
