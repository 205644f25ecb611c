"""`torch.func` over `objective`: reverse mode and vmap of every order, and a clear word where it cannot be followed."""

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import bilevel as bl
from bilevel.testing import relative_error

SETTINGS = {"dynamics": bl.GradientDescent(0.1), "steps": 12}


def inner(w, lam, x):
    return ((w - x) ** 2 + lam.exp() * w**2 + 0.1 * w**4).sum() + w[0] * w[1] * lam[1]


def outer(w, lam, x):
    return ((w - 1) ** 2).prod() + lam[0] * w[1]


PROBLEM = bl.Problem(inner, outer, lambda lam: torch.zeros_like(lam))


TWO = torch.tensor(2.0)


def f(lam, x=TWO):
    return bl.objective(PROBLEM, lam, bl.Task(x, None), **SETTINGS)


def plain(lam, x=TWO):
    """The same steps with torch.func.grad."""
    w = torch.zeros_like(lam)
    for _ in range(12):
        w = w - 0.1 * grad(inner)(w, lam, x)
    return outer(w, lam, x)


LAM = torch.tensor([0.1, -0.2])
LAMS = torch.tensor([[0.1, -0.2], [0.5, 0.3], [-1.0, 0.0]])
XS = torch.tensor([2.0, 1.0, -0.5])


@pytest.mark.parametrize(
    "ask",
    [
        lambda f: grad(f)(LAM),
        lambda f: jacrev(f)(LAM),
        lambda f: jacrev(jacrev(f))(LAM),
        lambda f: jacrev(grad(f))(LAM),
        lambda f: grad(lambda lam: (grad(f)(lam) ** 2).sum())(LAM),
        lambda f: vmap(f)(LAMS),
        lambda f: vmap(grad(f))(LAMS),
        lambda f: vmap(jacrev(jacrev(f)))(LAMS),
        lambda f: vmap(grad(f), in_dims=(None, 0))(LAM, XS),
        lambda f: vmap(grad(f), in_dims=(1, 0))(LAMS.T, XS),
        lambda f: vmap(lambda lam: vmap(lambda x: f(lam, x))(XS))(LAMS),
        lambda f: grad(f, argnums=1)(LAM, TWO),
        lambda f: vmap(jacrev(grad(f, argnums=1)))(LAMS, XS),
    ],
)
def test_it_is_what_torch_func_gives_on_the_steps_themselves(ask):
    assert relative_error(ask(f), ask(plain)) < 1e-10


@pytest.mark.parametrize(
    "method", [bl.Unrolled(), bl.Reverse("sqrt", group_bytes=0), bl.Forward(), bl.Reversible(), "auto"], ids=repr
)
def test_every_exact_method(method):
    def value(lam):
        dynamics = bl.HeavyBall(0.1, 0.5) if isinstance(method, bl.Reversible) else SETTINGS["dynamics"]
        return bl.objective(PROBLEM, lam, bl.Task(TWO, None), dynamics=dynamics, steps=12, method=method)

    lam = LAM.clone().requires_grad_()
    (expected,) = torch.autograd.grad(value(lam), lam)
    assert relative_error(grad(value)(LAM), expected) < 1e-12
    assert relative_error(vmap(jacrev(grad(value)))(LAMS)[0], torch.autograd.functional.hessian(value, LAM)) < 1e-10


def test_a_method_that_is_not_exact_has_a_first_derivative():
    def value(lam):
        return bl.objective(PROBLEM, lam, bl.Task(TWO, None), method=bl.Truncated(5), **SETTINGS)

    expected = bl.hypergradient(PROBLEM, LAM, bl.Task(TWO, None), method=bl.Truncated(5), **SETTINGS).grad
    assert torch.equal(grad(value)(LAM), expected)
    with pytest.raises(bl.BilevelError, match="second derivative"):
        jacrev(jacrev(value))(LAM)


def test_vmap_of_lam_that_requires_grad():
    lams = LAMS.clone().requires_grad_()
    vmap(f)(lams).sum().backward()
    assert relative_error(lams.grad, vmap(grad(plain))(LAMS)) < 1e-10


@pytest.mark.parametrize(
    "ask",
    [lambda: hessian(f)(LAM), lambda: jacfwd(f)(LAM), lambda: jvp(f, (LAM,), (LAM,)), lambda: jacfwd(grad(f))(LAM)],
)
def test_forward_mode_is_refused(ask):
    with pytest.raises(bl.BilevelError, match=r"jacrev\(torch\.func\.jacrev\(f\)\)"):
        ask()


@pytest.mark.parametrize("transform", [lambda g: grad(g)(XS[0]), lambda g: vmap(g)(XS)])
@pytest.mark.parametrize("where", ["inner", "outer", "init", "dynamics"])
def test_what_arrives_through_a_closure_is_refused(transform, where):
    def closed(x):
        problem = bl.Problem(
            inner=lambda w, lam, _: inner(w, lam, x if where == "inner" else 2.0),
            outer=lambda w, lam, _: outer(w, lam, 0) * (x if where == "outer" else 1.0),
            init=lambda lam: torch.zeros_like(lam) + (x if where == "init" else 0.0),
        )
        lr = 0.1 * x if where == "dynamics" else 0.1
        return bl.objective(problem, LAM, bl.Task(None, None), dynamics=bl.GradientDescent(lr), steps=3)

    with pytest.raises(bl.BilevelError, match="through a closure"):
        transform(closed)


@pytest.mark.parametrize("transform", [grad, vmap])
def test_hypergradient_within_a_transform_is_refused(transform):
    def value(lam):
        return bl.hypergradient(PROBLEM, lam, bl.Task(XS[0], None), **SETTINGS).value

    with pytest.raises(bl.BilevelError, match=r"Write objective\("):
        transform(value)(LAMS)
