"""Three levels: `objective` inside the inner objective of another problem."""

import pytest
import torch

import bilevel as bl
from bilevel.testing import central_differences, relative_error

LOWER = {"dynamics": bl.GradientDescent(0.2), "steps": 6}
UPPER = {"dynamics": bl.GradientDescent(0.15), "steps": 5}
TASK = bl.Task(None, None)


def lower_inner(v, lam, x):
    """v is the lowest variable; u and the penalty p are variables of the levels above it."""
    return ((v - lam["u"] * x) ** 2 + lam["p"].exp() * v**2 + 0.1 * torch.sin(v + lam["u"])).sum()


def lower_outer(v, lam, x):
    return (torch.cosh(v - 1) + 0.3 * v * lam["u"]).sum()


def upper_outer(u, p, batch):
    return ((u - 0.5) ** 2).sum() + 0.1 * p**2


LOWEST = bl.Problem(lower_inner, lower_outer, lambda lam: torch.zeros_like(lam["u"]))
X = torch.tensor([1.0, -0.5, 2.0])
U0 = torch.tensor([0.2, 0.4, -0.1])


def nested(method=None):
    """The middle problem: its inner objective contains the lowest problem's f_T."""

    def inner(u, p, batch):
        return bl.objective(LOWEST, {"u": u, "p": p}, bl.Task(X, X), method=method, **LOWER) + 0.1 * (u**2).sum()

    return bl.Problem(inner, upper_outer, lambda p: U0)


def by_hand(p):
    """All three levels in plain torch."""
    u = U0.clone().requires_grad_()
    for _ in range(5):
        v = torch.zeros_like(u)
        for _ in range(6):
            v = v.requires_grad_() if not v.requires_grad else v
            (slope,) = torch.autograd.grad(lower_inner(v, {"u": u, "p": p}, X), v, create_graph=True)
            v = v - 0.2 * slope
        loss = lower_outer(v, {"u": u, "p": p}, X) + 0.1 * (u**2).sum()
        u = u - 0.15 * torch.autograd.grad(loss, u, create_graph=True)[0]
    return upper_outer(u, p, None)


P = torch.tensor(-0.7)
EXPECTED = torch.autograd.grad(by_hand(live := P.clone().requires_grad_()), live)[0]


@pytest.mark.parametrize("lower", [None, bl.Unrolled(), bl.Reverse("sqrt", group_bytes=0), bl.Forward()], ids=repr)
@pytest.mark.parametrize(
    "upper", [None, bl.Unrolled(), bl.Reverse(2, group_bytes=0), bl.Forward(), bl.Truncated(5), "auto"], ids=repr
)
def test_three_levels_are_those_of_plain_torch(upper, lower):
    found = bl.hypergradient(nested(lower), P, TASK, method=upper, **UPPER)
    assert relative_error(found.value, by_hand(P).detach()) < 1e-12
    assert relative_error(found.grad, EXPECTED) < 1e-9


def test_three_levels_agree_with_differences():
    found = central_differences(lambda p: bl.hypergradient(nested(), p, TASK, **UPPER).value, P)
    assert relative_error(found, EXPECTED) < 1e-8


def test_a_closed_form():
    """v* = λ/2 minimises (v − λ)² + v²; then u* = argmin (u/2 − 1)² + p u² = 2/(1 + 4p), and f(p) = u*."""
    lowest = bl.Problem(
        lambda v, u, b: (v - u) ** 2 + v**2, lambda v, u, b: (v - 1) ** 2, lambda u: torch.zeros_like(u)
    )

    def inner(u, p, batch):
        lower = bl.objective(lowest, u, TASK, dynamics=bl.GradientDescent(0.25), steps=1)
        return lower + p * u**2

    problem = bl.Problem(inner, lambda u, p, batch: u, lambda p: torch.zeros_like(p))
    p = torch.tensor(0.3)
    for method in (bl.Reverse(), bl.Implicit(bl.CG(tol=1e-13))):
        found = bl.hypergradient(problem, p, TASK, dynamics=bl.GradientDescent(0.5), steps=150, method=method)
        assert relative_error(found.value, 2 / (1 + 4 * p)) < 1e-10
        assert relative_error(found.grad, -8 / (1 + 4 * p) ** 2) < 1e-10


def test_second_derivatives_of_three_levels():
    found = torch.autograd.functional.hessian(lambda p: bl.objective(nested(), p, TASK, **UPPER), P)
    assert relative_error(found, torch.autograd.functional.hessian(by_hand, P)) < 1e-9


def test_four_levels():
    """One level more on top: p is now learned by two steps of its own."""
    inner = nested()
    top = bl.Problem(
        inner=lambda p, q, b: bl.objective(inner, p, TASK, **UPPER) + q.exp() * p**2,
        outer=lambda p, q, b: (p - 1) ** 2,
        init=lambda q: P,
    )
    q = torch.tensor(-1.0)
    found = bl.hypergradient(top, q, TASK, dynamics=bl.GradientDescent(0.1), steps=2)
    live, p = q.clone().requires_grad_(), P.clone().requires_grad_()
    for _ in range(2):
        p = p - 0.1 * torch.autograd.grad(by_hand(p) + live.exp() * p**2, p, create_graph=True)[0]
    (expected,) = torch.autograd.grad((p - 1) ** 2, live)
    assert relative_error(found.grad, expected) < 1e-9


def test_the_lowest_problem_in_the_outer_objective():
    """Where only its first derivative is needed, any method will do."""
    lowest = bl.Problem(
        lambda v, u, b: ((v - u) ** 2).sum(), lambda v, u, b: (v**2).sum(), lambda u: torch.zeros_like(u)
    )

    def value(u, method):
        return bl.objective(lowest, u, TASK, dynamics=bl.GradientDescent(0.25), steps=40, method=method)

    for method in (bl.Reverse(), bl.Implicit(bl.CG(tol=1e-13)), bl.Spectral()):
        problem = bl.Problem(
            inner=lambda u, p, b: ((u - p) ** 2).sum(),
            outer=lambda u, p, b, method=method: value(u, method),
            init=lambda p: torch.zeros_like(p),
        )
        p = torch.tensor([0.5, -1.0])
        found = bl.hypergradient(problem, p, TASK, dynamics=bl.GradientDescent(0.25), steps=40)
        assert relative_error(found.grad, 2 * p) < 1e-9


@pytest.mark.parametrize("lower", [bl.Implicit(), bl.FirstOrder(), bl.Truncated(2)], ids=repr)
def test_a_lower_method_without_second_derivatives_is_refused(lower):
    lowest = bl.Problem(
        lambda v, u, b: ((v - u) ** 2).sum(), lambda v, u, b: (v**2 * u).sum(), lambda u: torch.zeros_like(u)
    )
    problem = bl.Problem(
        inner=lambda u, p, b: bl.objective(lowest, u, TASK, method=lower, **LOWER) + p * (u**2).sum(),
        outer=lambda u, p, b: (u**2).sum(),
        init=lambda p: torch.ones(2),
    )
    with pytest.raises(bl.BilevelError, match=r"second derivative.*within another problem.*Reverse\(\)"):
        bl.hypergradient(problem, torch.tensor(0.2), TASK, **UPPER)


@pytest.mark.parametrize("upper", [bl.Reverse(), bl.Unrolled(), bl.Forward()], ids=repr)
def test_data_made_from_variables_above(upper):
    """The lowest problem fits u·X: u and p reach it as data and not as λ."""
    lowest = bl.Problem(
        lambda v, lam, x: (torch.log(torch.cosh(v - x)) + lam * v**2).sum(),
        lambda v, lam, x: (v * x).sum(),
        lambda lam: torch.zeros(3),
    )

    def inner(u, p, batch):
        lam = torch.tensor(0.2)
        return bl.objective(lowest, lam, bl.Task(u * X, p * X), **LOWER) + 0.5 * (u**2).sum()

    def plain(p):
        u = U0.clone().requires_grad_()
        for _ in range(5):
            v = torch.zeros(3)
            for _ in range(6):
                v = v - 0.2 * (torch.tanh(v - u * X) + 0.4 * v)
            loss = (v * p * X).sum() + 0.5 * (u**2).sum()
            u = u - 0.15 * torch.autograd.grad(loss, u, create_graph=True)[0]
        return upper_outer(u, p, None)

    found = bl.hypergradient(bl.Problem(inner, upper_outer, lambda p: U0), P, TASK, method=upper, **UPPER)
    live = P.clone().requires_grad_()
    assert relative_error(found.grad, torch.autograd.grad(plain(live), live)[0]) < 1e-9


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("upper", [bl.Reverse(), bl.Unrolled()], ids=repr)
@pytest.mark.parametrize("where", ["init", "inner", "outer", "dynamics"])
def test_a_variable_above_in_a_closure_is_refused(where, upper, steps):
    def inner(u, p, batch):
        def read(part, otherwise):
            return u if part == where else otherwise

        lowest = bl.Problem(
            inner=lambda v, lam, b: (v - lam) ** 2 * read("inner", 1.0),
            outer=lambda v, lam, b: v**2 * read("outer", 1.0),
            init=lambda lam: read("init", torch.zeros(())) + 0.5,
        )
        dynamics = bl.GradientDescent(0.1 * read("dynamics", 1.0))
        return bl.objective(lowest, p, TASK, dynamics=dynamics, steps=3) + p * u**2

    problem = bl.Problem(inner, lambda u, p, batch: (u - 1) ** 2, lambda p: torch.ones(()))
    with pytest.raises(bl.BilevelError, match=f"{where} .*closure.*leaf of λ"):
        bl.hypergradient(problem, P, TASK, dynamics=bl.GradientDescent(0.1), steps=steps, method=upper)


def test_solve_on_three_levels():
    solution = bl.solve(
        nested(), P, TASK, optimizer=lambda params: torch.optim.SGD(params, lr=0.5), iterations=5, **UPPER
    )
    live = P.clone()
    for _ in range(5):
        live = live.requires_grad_()
        live = (live - 0.5 * torch.autograd.grad(by_hand(live), live)[0]).detach()
    assert relative_error(solution.outer, live) < 1e-9
