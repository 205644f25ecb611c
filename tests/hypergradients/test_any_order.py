"""Second derivatives of f_T are right, or refused: torch's third derivatives of normalisations are not."""

import pytest
import torch
import torch.nn.functional as F

import bilevel as bl
from bilevel.engine.any_order import WRITTEN_OUT, AnyOrder

RUN = {"dynamics": bl.GradientDescent(0.05), "steps": 4}


def problem(layer):
    draw = torch.Generator().manual_seed(1)
    start = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in ((5, 4), (4, 3))]

    def error(w, lam, data):
        return ((layer(torch.tanh(data[0] @ w[0])) @ w[1] - data[1]) ** 2).mean()

    def inner(w, lam, data):
        return error(w, lam, data) + lam.exp() * sum((part**2).sum() for part in w)

    x, y = (torch.randn(12, size, generator=draw, dtype=torch.float64) for size in (5, 3))
    return bl.Problem(inner, error, lambda lam: start), bl.Task((x[:6], y[:6]), (x[6:], y[6:]))


LAYERS = {
    "batch": lambda x: F.batch_norm(x, None, None, training=True),
    "module": torch.nn.BatchNorm1d(4, affine=False).double(),
    "instance": lambda x: F.instance_norm(x[None]).squeeze(0),
    "layer": lambda x: F.layer_norm(x, (4,), torch.linspace(0.5, 2, 4).double()),
}


@pytest.mark.parametrize("name", LAYERS)
def test_second_derivatives_through_a_normalisation(name):
    given, task = problem(LAYERS[name])

    def slope(at, of, create_graph=False):
        lam = torch.tensor(at, dtype=torch.float64, requires_grad=True)
        (found,) = torch.autograd.grad(of(lam), lam, create_graph=create_graph)
        return torch.autograd.grad(found, lam)[0] if create_graph else found

    def length(lam):
        return sum((part**4).sum() for part in bl.inner_solution(given, lam, task, **RUN))

    for of in (lambda lam: bl.objective(given, lam, task, **RUN), length):
        expected = (slope(-2 + 1e-4, of) - slope(-2 - 1e-4, of)) / 2e-4
        assert torch.allclose(slope(-2.0, of, create_graph=True), expected, rtol=1e-6)


class Cube(torch.autograd.Function):
    """x³, whose second derivative 6x is a constant for torch."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        return Slope.apply(*ctx.saved_tensors, g)


class Slope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, g):
        ctx.save_for_backward(x, g)
        return 3 * x**2 * g

    @staticmethod
    def backward(ctx, h):
        x, g = ctx.saved_tensors
        return 6 * x.detach() * g * h, 3 * x.detach() ** 2 * h


def test_a_third_derivative_that_is_lost_is_noticed_when_it_is_needed():
    given, task = problem(Cube.apply)
    lam = torch.tensor(-2.0, dtype=torch.float64, requires_grad=True)
    assert torch.isfinite(bl.hypergradient(given, lam, task, **RUN).grad)
    with pytest.raises(bl.BilevelError, match=r"products with its Hessian.*Second derivatives of f_T would be wrong"):
        torch.autograd.grad(bl.objective(given, lam, task, **RUN), lam, create_graph=True)
        value = bl.objective(given, lam, task, **RUN)
        (slope,) = torch.autograd.grad(value, lam, create_graph=True)
        torch.autograd.grad(slope, lam)


def test_normalisations_that_are_written_out_are_those_of_torch():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, 2, 5, generator=draw, dtype=torch.float64)
    four, last = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in ((4,), (2, 5)))
    mean, var = torch.zeros(4).double(), torch.ones(4).double()
    calls = [
        lambda: F.batch_norm(x, mean, var, four, four + 1, training=True, eps=0.1),
        lambda: F.batch_norm(x, mean, var, four),
        lambda: F.instance_norm(x, weight=four, bias=four + 1),
        lambda: F.instance_norm(x, mean, var, use_input_stats=False),
        lambda: F.layer_norm(x, (2, 5), last, last + 1, 0.1),
        lambda: torch.nn.LayerNorm(5).double()(x),
    ]
    for call in calls:
        with AnyOrder():
            found = call()
        assert torch.equal(mean, torch.zeros(4)) and torch.equal(var, torch.ones(4)), "running averages moved"
        assert torch.allclose(found, call(), rtol=1e-10, atol=1e-12)
        mean.zero_(), var.fill_(1)
    assert len(WRITTEN_OUT) == 3
