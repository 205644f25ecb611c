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


def test_weight_norm_in_an_encoder():
    """Its second derivative is wrong in torch, and an encoder is differentiated once except here."""
    given, task = problem(lambda x: x)
    scale = torch.linspace(0.5, 2, 5).double()[:, None]

    def encode(lam, task):
        layer = torch._weight_norm(lam, scale, 0)
        return bl.Task(*((torch.tanh(x @ layer), y) for x, y in (task.train, task.val)))

    ridge = lambda w, lam, data: given.outer(w, lam, data) + 0.1 * sum((part**2).sum() for part in w)  # noqa: E731
    encoded = bl.Problem(ridge, given.outer, lambda lam: given.init(None), encode)
    lam, direction = torch.linspace(-1, 1, 50).double().reshape(2, 5, 5).sin()

    def slope(lam):
        return bl.hypergradient(encoded, lam, task, **RUN).grad

    live = lam.clone().requires_grad_()
    (first,) = torch.autograd.grad(bl.objective(encoded, live, task, **RUN), live, create_graph=True)
    (second,) = torch.autograd.grad((first * direction).sum(), live)
    expected = (slope(lam + 1e-5 * direction) - slope(lam - 1e-5 * direction)) / 2e-5
    torch.testing.assert_close(second, expected, rtol=1e-6, atol=1e-8)


class CubeOnce(torch.autograd.Function):
    """x³, whose derivative 3x² is a constant for torch."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        return 3 * ctx.saved_tensors[0].detach() ** 2 * g


@pytest.mark.parametrize("part", ["init", "encode", "dynamics"])
def test_second_derivatives_that_are_hidden_outside_of_the_objectives(part):
    given, task = problem(lambda x: x)
    ridge = lambda w, lam, data: given.outer(w, lam, data) + lam.exp() * sum((part**2).sum() for part in w)  # noqa: E731

    def of(cube):
        init = (lambda lam: [cube(lam) * x for x in given.init(lam)]) if part == "init" else given.init
        encode = (lambda lam, t: bl.Task((t.train[0] * cube(lam), t.train[1]), t.val)) if part == "encode" else None
        rate = (lambda lam: bl.GradientDescent(-0.01 * cube(lam))) if part == "dynamics" else RUN["dynamics"]
        lam = torch.tensor(-2.0, dtype=torch.float64, requires_grad=True)
        f = bl.objective(bl.Problem(ridge, given.outer, init, encode), lam, task, dynamics=rate, steps=4)
        (first,) = torch.autograd.grad(f, lam, create_graph=True)
        return torch.autograd.grad(first, lam)[0]

    assert torch.isfinite(of(lambda x: x**3))
    with pytest.raises(bl.BilevelError, match=f"second derivatives of {part}"):
        of(CubeOnce.apply)
