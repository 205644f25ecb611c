"""Second derivatives that autograd loses: right or refused.

The reference is always f by the same steps, differentiated by central differences.
"""

import copy

import pytest
import torch
from comparing import EXACT, NO_DATA, close, differences, regression, right_or_refused, slope, squares, unrolled, zeros
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import bilevel as bl

TASK = regression(10, 3)
RUN = {"dynamics": bl.GradientDescent(0.2), "steps": 5}
METHODS = {
    "Unrolled": bl.Unrolled(),
    "Reverse": bl.Reverse(),
    "Reverse from few checkpoints": bl.Reverse(2, group_bytes=0),
    "Forward": bl.Forward(),
    "Spectral": bl.Spectral(),
    "auto": "auto",
}


def by_differences(inner, outer, lam, task=TASK, lr=0.2, steps=5, size=3):
    """∇f of steps of gradient descent that need first derivatives only."""

    def f(lam):
        w = torch.zeros(size)
        for _ in range(steps):
            w = w - lr * slope(lambda w: inner(w, lam, task.train), w).grad
        return outer(w, lam, task.val)

    return differences(f, lam).grad


class Square(torch.autograd.Function):
    """x² whose derivative is written in numbers: right once, gone twice."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x * g


def detached_backward(x):
    """The same by a hook-free trick: the value of x², the slope of a constant 2x."""
    return x.detach() ** 2 + 2 * x.detach() * (x - x.detach())


def asked(inner, lam, method=None, dynamics=RUN["dynamics"], steps=RUN["steps"]):
    """A question that `right_or_refused` may ask."""
    problem = bl.Problem(inner, squares, zeros(3))
    return lambda: bl.hypergradient(problem, lam, TASK, dynamics=dynamics, steps=steps, method=method).grad


def fit_with(square):
    def inner(w, lam, data):
        return 0.5 * square(data[0] @ w - data[1]).mean() + 0.5 * (lam.exp() * w**2).sum()

    return inner


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("square", [Square.apply, detached_backward], ids=["once differentiable", "detached slope"])
def test_a_square_whose_second_derivative_is_lost(square, name):
    """The penalty beside it keeps its own Hessian, so that the result looks plausible."""
    lam, inner = torch.tensor([-1.0, 0.0, 0.5]), fit_with(square)
    expected = by_differences(inner, squares, lam)
    ask = asked(inner, lam, METHODS[name])
    right_or_refused(ask, expected)


@pytest.mark.parametrize("method", [bl.Implicit(), bl.Implicit(bl.Direct())], ids=["CG", "direct"])
def test_a_lost_second_derivative_at_the_minimum(method):
    lam, inner = torch.tensor([-1.0, 0.0, 0.5]), fit_with(Square.apply)
    expected = by_differences(inner, squares, lam, lr=0.3, steps=200)
    ask = asked(inner, lam, method, bl.GradientDescent(0.3), 200)
    right_or_refused(ask, expected, tolerance=1e-5)


@pytest.mark.parametrize("name", ["Unrolled", "Reverse", "Forward"])
def test_a_loss_that_is_compiled_ahead_of_time(name):
    """The compiled part has no second derivative; the penalty outside it has."""
    compiled = torch.compile(squares, backend="aot_eager")
    inner = lambda w, lam, data: compiled(w, None, data) + 0.5 * (lam.exp() * w**2).sum()  # noqa: E731
    eager = lambda w, lam, data: squares(w, None, data) + 0.5 * (lam.exp() * w**2).sum()  # noqa: E731
    lam = torch.tensor([-1.0, 0.0, 0.5])
    expected = by_differences(eager, squares, lam)
    ask = asked(inner, lam, METHODS[name])
    right_or_refused(ask, expected)


def network_case(network, lr=0.1):
    """A penalty on all weights of a small network, three steps from its own start."""
    start, apply = bl.functional(network.double())
    lam = torch.tensor(-2.0)
    error = lambda w, data: ((apply(w, data[0])[:, 0] - data[1]) ** 2).mean()  # noqa: E731
    inner = lambda w, lam, data: error(w, data) + lam.exp() * sum((p**2).sum() for p in w.values())  # noqa: E731
    problem = bl.Problem(inner, lambda w, lam, data: error(w, data), lambda lam: start)
    return problem, lam, {"dynamics": bl.GradientDescent(lr), "steps": 3}


def steps_of_torch(network, lam, lr=0.1):
    """The same training of a copy of the module itself, the parameters moved in place: what anybody would run."""
    network = copy.deepcopy(network).double()
    for _ in range(3):
        network.zero_grad()
        penalty = lam.exp() * sum((p**2).sum() for p in network.parameters())
        (((network(TASK.train[0])[:, 0] - TASK.train[1]) ** 2).mean() + penalty).backward()
        with torch.no_grad():
            for p in network.parameters():
                p -= lr * p.grad
    return ((network(TASK.val[0])[:, 0] - TASK.val[1]) ** 2).mean().detach()


class Recomputing(nn.Module):
    """A hidden layer in a checkpoint: the backward pass runs the module again, with whatever weights it then has."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(checkpoint(lambda x: self.hidden(x).tanh(), x, use_reentrant=False))


MODULES = {
    "weight norm": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 1)
    ),
    "a module that is recomputed in the backward pass": Recomputing,
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("method", EXACT[:2], ids=lambda m: type(m).__name__)
def test_modules_whose_derivatives_mislead(name, method):
    torch.manual_seed(0)
    network = MODULES[name]()
    problem, lam, run = network_case(network)
    expected = differences(lambda lam: steps_of_torch(network, lam), lam).grad
    right_or_refused(lambda: bl.hypergradient(problem, lam, TASK, method=method, **run).grad, expected)


def test_an_honest_custom_function_is_not_refused():
    """The same square with a backward pass that is itself differentiable."""

    class Honest(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**2

        @staticmethod
        def backward(ctx, g):
            return 2 * ctx.saved_tensors[0] * g

    lam, inner = torch.tensor([-1.0, 0.0, 0.5]), fit_with(Honest.apply)
    expected = by_differences(inner, squares, lam)
    for method in (bl.Unrolled(), bl.Reverse(), bl.Forward()):
        found = bl.hypergradient(bl.Problem(inner, squares, zeros(3)), lam, TASK, method=method, **RUN).grad
        assert right_or_refused(lambda found=found: found, expected, tolerance=1e-7)


def test_no_data_and_no_second_derivative():
    """A linear inner objective has the Hessian 0, and that is right."""
    problem = bl.Problem(lambda w, lam, data: (lam * w).sum(), lambda w, lam, data: (w**3).sum(), zeros(2))
    lam = torch.tensor([1.0, -2.0])
    found = bl.hypergradient(problem, lam, NO_DATA, dynamics=bl.GradientDescent(0.1), steps=4).grad
    assert right_or_refused(lambda: found, 3 * (-0.4) ** 3 * lam**2, tolerance=1e-10)


def test_a_derivative_that_is_left_out_on_purpose():
    """Examples weighed by their detached losses: refused, and where it is meant, what plain torch gives."""
    lam = torch.tensor([0.5, -1.0])

    def inner(w, lam, data):
        losses = (data[0] @ w - data[1]) ** 2
        return (torch.sigmoid(lam[0] + lam[1] * losses.detach()) * losses).mean()

    def plain(lam):
        return squares(unrolled(lambda w, t: inner(w, lam, TASK.train), torch.zeros(3), 5, 0.2), None, TASK.val)

    expected = slope(plain, lam).grad
    with pytest.raises(bl.BilevelError, match="check_derivatives=False"):
        bl.hypergradient(bl.Problem(inner, squares, zeros(3)), lam, TASK, **RUN)
    problem = bl.Problem(inner, squares, zeros(3), check_derivatives=False)
    for method in EXACT:
        close(bl.hypergradient(problem, lam, TASK, method=method, **RUN).grad, expected, 1e-10, method)
