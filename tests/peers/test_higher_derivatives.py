"""Second derivatives of f, gradient penalties, torch.func, and problems inside problems.

The references differentiate closed forms and written-out steps with plain torch, as often as needed.
"""

import pytest
import torch
from comparing import NO_DATA, differences, regression, right_or_refused, slope, squares, unrolled, zeros

import bilevel as bl

METHODS = {
    "Unrolled": bl.Unrolled(),
    "Reverse": bl.Reverse(),
    "Reverse from few checkpoints": bl.Reverse(3, group_bytes=0),
    "Forward": bl.Forward(),
    "Spectral": bl.Spectral(),
    "auto": "auto",
}
SCALAR = bl.Problem(
    lambda w, lam, data: (w - 3) ** 2 + lam.exp() * w**2, lambda w, lam, data: (w - 1) ** 2, lambda lam: torch.zeros(())
)
RUN = {"dynamics": bl.GradientDescent(0.1), "steps": 20}


def scalar(lam):
    """w_T = w*(1 − (1 − 0.2(1 + e^λ))^20), w* = 3/(1 + e^λ)."""
    s = 1 + lam.exp()
    return (3 / s * (1 - (1 - 0.2 * s) ** 20) - 1) ** 2


@pytest.mark.parametrize("name", METHODS)
def test_the_hessian_of_one_number(name):
    lam = torch.tensor(0.0)
    f = lambda lam: bl.objective(SCALAR, lam, NO_DATA, method=METHODS[name], **RUN)  # noqa: E731
    expected = torch.autograd.functional.hessian(scalar, lam)
    assert right_or_refused(lambda: torch.autograd.functional.hessian(f, lam), expected, tolerance=1e-9)


@pytest.mark.parametrize("name", METHODS)
def test_a_penalty_on_the_norm_of_the_hypergradient(name):
    """∇(f + ‖∇f‖²/2), which takes the gradient of a gradient."""
    lam = torch.tensor(0.3)

    def penalised(f, lam):
        live = lam.clone().requires_grad_()
        value = f(live)
        (g,) = torch.autograd.grad(value, live, create_graph=True)
        return torch.autograd.grad(value + 0.5 * g**2, live)[0]

    f = lambda lam: bl.objective(SCALAR, lam, NO_DATA, method=METHODS[name], **RUN)  # noqa: E731
    assert right_or_refused(lambda: penalised(f, lam), penalised(scalar, lam), tolerance=1e-9)


TASK = regression(12, 3)
RIDGE = bl.Problem(lambda w, lam, data: squares(w, lam, data) + 0.5 * (lam.exp() * w**2).sum(), squares, zeros(3))


def ridge(lam):
    inner = lambda w, t: RIDGE.inner(w, lam, TASK.train)  # noqa: E731
    return squares(unrolled(inner, torch.zeros(3), 10, 0.2), None, TASK.val)


TEN = {"dynamics": bl.GradientDescent(0.2), "steps": 10}


@pytest.mark.parametrize("name", METHODS)
def test_the_hessian_of_a_penalty_for_each_feature(name):
    lam = torch.tensor([-1.0, 0.0, 0.5])
    f = lambda lam: bl.objective(RIDGE, lam, TASK, method=METHODS[name], **TEN)  # noqa: E731
    expected = torch.autograd.functional.hessian(ridge, lam)
    assert right_or_refused(lambda: torch.autograd.functional.hessian(f, lam), expected, tolerance=1e-9)


def test_a_newton_step_on_the_outer_problem():
    """λ − H⁻¹∇f, with both from `objective`, as from the closed form."""
    lam = torch.tensor(0.2)

    def newton(f):
        return lam - slope(f, lam).grad / torch.autograd.functional.hessian(f, lam)

    f = lambda lam: bl.objective(SCALAR, lam, NO_DATA, **RUN)  # noqa: E731
    assert right_or_refused(lambda: newton(f), newton(scalar), tolerance=1e-9)


def test_the_third_derivative():
    def third(f):
        lam = torch.tensor(0.1, requires_grad=True)
        (first,) = torch.autograd.grad(f(lam), lam, create_graph=True)
        (second,) = torch.autograd.grad(first, lam, create_graph=True)
        return torch.autograd.grad(second, lam)[0]

    f = lambda lam: bl.objective(SCALAR, lam, NO_DATA, **RUN)  # noqa: E731
    assert right_or_refused(lambda: third(f), third(scalar), tolerance=1e-8)


TRANSFORMS = {
    "the gradient": torch.func.grad,
    "the gradient of the gradient": lambda f: torch.func.grad(torch.func.grad(f)),
    "the Hessian in reverse mode": lambda f: torch.func.jacrev(torch.func.jacrev(f)),
    "gradients at many points": lambda f: lambda lam: torch.vmap(torch.func.grad(f))(lam + torch.linspace(0, 1, 3)),
    "the Hessian in forward mode": torch.func.hessian,
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_torch_func(name):
    f = lambda lam: bl.objective(SCALAR, lam, NO_DATA, **RUN)  # noqa: E731
    lam, apply = torch.tensor(0.1), TRANSFORMS[name]
    answered = right_or_refused(lambda: apply(f)(lam), apply(scalar)(lam), tolerance=1e-9)
    assert answered or name == "the Hessian in forward mode"


@pytest.mark.parametrize("method", [bl.Implicit(), bl.Truncated(3), bl.FirstOrder()], ids=lambda m: type(m).__name__)
def test_methods_that_are_not_exact_have_no_hessian(method):
    problem = bl.Problem(SCALAR.inner, lambda w, lam, data: (w - lam) ** 2, SCALAR.init)
    plain = differences(
        lambda lam: bl.hypergradient(problem, lam, NO_DATA, method=method, **RUN).grad, torch.tensor(0.0)
    )
    f = lambda lam: bl.objective(problem, lam, NO_DATA, method=method, **RUN)  # noqa: E731
    assert not right_or_refused(lambda: torch.autograd.functional.hessian(f, torch.tensor(0.0)), plain.grad)


@pytest.mark.parametrize("outside", ["Unrolled", "Reverse", "Reverse from few checkpoints", "Forward"])
@pytest.mark.parametrize("inside", ["Unrolled", "Reverse", "Spectral"])
def test_three_levels_by_nesting(inside, outside):
    """The penalties u of a ridge are learned on one validation set; λ penalises u and is judged on another."""
    more = regression(12, 3, seed=5).val
    lam = torch.tensor(-1.0)

    def nested(u, lam, data):
        f = bl.objective(RIDGE, u, TASK, method=METHODS[inside], **TEN)
        return f + 0.1 * lam.exp() * (u**2).sum()

    def fitted(u):
        return unrolled(lambda w, t: RIDGE.inner(w, u, TASK.train), torch.zeros(3), 10, 0.2)

    def judge(u):
        return bl.objective(bl.Problem(RIDGE.inner, squares, zeros(3)), u, bl.Task(TASK.train, more), **TEN)

    def plain(lam):
        middle = lambda u, t: squares(fitted(u), None, TASK.val) + 0.1 * lam.exp() * (u**2).sum()  # noqa: E731
        return squares(fitted(unrolled(middle, torch.full((3,), 0.5), 4, 0.5)), None, more)

    problem = bl.Problem(nested, lambda u, lam, data: judge(u), lambda lam: torch.full((3,), 0.5))

    def ask():
        run = {"dynamics": bl.GradientDescent(0.5), "steps": 4, "method": METHODS[outside]}
        return bl.hypergradient(problem, lam, NO_DATA, **run).grad

    assert right_or_refused(ask, slope(plain, lam).grad, tolerance=1e-8)
