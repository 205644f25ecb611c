"""Inner solvers that stop at a tolerance: what they reach, how many steps they report, who may differentiate them."""

import functools

import pytest
import torch

import bilevel as bl
from bilevel import trees
from bilevel.hypergradients import value_of
from bilevel.testing import central_differences, relative_error


def logistic():
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(40, 4, generator=generator), torch.randn(40, generator=generator).sign()

    def error(w, data):
        return torch.nn.functional.softplus(-data[1] * (data[0] @ w)).mean()

    problem = bl.Problem(
        inner=lambda w, lam, data: error(w, data) + (lam.exp() * w**2).sum(),
        outer=lambda w, lam, data: error(w, data),
        init=lambda lam: torch.zeros(4),
    )
    return problem, torch.linspace(-4, -2, 4), bl.Task((x[:25], y[:25]), (x[25:], y[25:]))


SOLVERS = [
    bl.LBFGS(1e-8),
    bl.Until(bl.LineSearch(4.0), tol=1e-9),
    bl.Until(bl.GradientDescent(1.5), tol=1e-9),
    bl.Until(bl.HeavyBall(1.0, 0.8), tol=1e-9, every=3),
]


@functools.cache
def differences_at_the_limit():
    problem, lam, task = logistic()
    exact = {"dynamics": bl.HeavyBall(1.0, 0.8), "steps": 500}
    return central_differences(lambda lam: value_of(problem, lam, task, **exact), lam)


@pytest.mark.slow
@pytest.mark.parametrize("dynamics", SOLVERS, ids=str)
def test_the_implicit_gradient_at_the_tolerance(dynamics):
    problem, lam, task = logistic()
    run = {"dynamics": dynamics, "steps": 3000}
    found = bl.hypergradient(problem, lam, task, method=bl.Implicit(), **run)
    assert relative_error(found.grad, differences_at_the_limit()) < 1e-6
    slope = bl.gradient(lambda w: problem.inner(w, lam, task.train), found.inner)
    assert float(slope.detach().norm()) < 1e-7
    assert 1 < found.stats.iterations < 3000


def test_every_method_differentiates_the_steps_before_the_stop():
    problem, lam, task = logistic()
    run = {"dynamics": bl.Until(bl.LineSearch(4.0), tol=1e-2, every=2), "steps": 30}
    exact = bl.hypergradient(problem, lam, task, method=bl.Unrolled(), **run)
    assert exact.stats.iterations < 30
    for method in (bl.Reverse(), bl.Forward(), bl.Reverse("sqrt", group_bytes=0)):
        found = bl.hypergradient(problem, lam, task, method=method, **run)
        assert found.stats.iterations == exact.stats.iterations and relative_error(found.grad, exact.grad) < 1e-10
    numbers = central_differences(lambda lam: value_of(problem, lam, task, **run), lam)
    assert relative_error(exact.grad, numbers) < 1e-6


@pytest.mark.parametrize("method", [bl.Reverse(), bl.Unrolled(), bl.Forward(), bl.Truncated(1)], ids=str)
def test_a_solver_is_not_differentiated_step_by_step(method):
    problem, lam, task = logistic()
    with pytest.raises(bl.BilevelError, match=r"LBFGS.*Use Implicit\(\)"):
        bl.hypergradient(problem, lam, task, dynamics=bl.LBFGS(), steps=1, method=method)


def test_until_does_not_hide_that_a_solver_has_no_derivative():
    problem, lam, task = logistic()
    run = {"dynamics": bl.Until(bl.LBFGS(), tol=1e-6, every=1), "steps": 3}
    with pytest.raises(bl.BilevelError, match="Reverse differentiates the steps, but a step of Until"):
        bl.hypergradient(problem, lam, task, allow_unused=True, **run)
    exact = bl.hypergradient(problem, lam, task, method=bl.Implicit(newton=1e-12), **run)
    chosen = bl.hypergradient(problem, lam, task, method="auto", **run)
    assert chosen.stats.method == "Implicit" and relative_error(chosen.grad, exact.grad) < 1e-4


def test_values_of_a_solver_are_not_compared():
    problem, lam, task = logistic()
    refusal = "ZeroOrder compares values of f_T.*Use a dynamics whose steps are differentiable"
    with pytest.raises(bl.BilevelError, match=refusal):
        bl.hypergradient(problem, lam, task, dynamics=bl.LBFGS(), steps=1, method=bl.ZeroOrder())


def test_auto_chooses_implicit_and_the_value_needs_no_method():
    problem, lam, task = logistic()
    run = {"dynamics": bl.LBFGS(), "steps": 1}
    found = bl.hypergradient(problem, lam, task, method="auto", **run)
    assert found.stats.method == "Implicit" and "LBFGS" in found.stats.reason
    with torch.no_grad():
        assert relative_error(bl.objective(problem, lam, task, **run), found.value) < 1e-9
    both = bl.hypergradient(problem, lam, [task, task], method=bl.Implicit(), **run)
    assert both.stats.iterations == 2 * found.stats.iterations
    assert bl.certify(problem, lam, task, **run).inner_distance < 1e-5


def test_a_solver_as_a_layer():
    problem, lam, task = logistic()
    point = lam.clone().requires_grad_()
    w = bl.inner_solution(problem, point, task, dynamics=bl.LBFGS(1e-8), steps=1, method=bl.Implicit())
    problem.outer(w, point, task.val).backward()
    expected = bl.hypergradient(problem, lam, task, dynamics=bl.LBFGS(1e-8), steps=1, method=bl.Implicit()).grad
    assert relative_error(point.grad, expected) < 1e-9


def test_a_tolerance_that_is_not_reached_is_warned_about():
    problem, lam, task = logistic()
    for dynamics in (bl.Until(bl.GradientDescent(0.1), tol=1e-9), bl.LBFGS(1e-8, max_iter=2)):
        with pytest.warns(bl.BilevelWarning, match="did not reach its tolerance"):
            bl.hypergradient(problem, lam, task, dynamics=dynamics, steps=1, method=bl.Implicit())


def test_levenberg_and_marquardt():
    """A curve with two numbers through noisy points; w is checked by the gradient and the slope by differences."""
    t = torch.linspace(0, 2, 12)
    y = 2 * torch.exp(-0.8 * t) + 0.05 * torch.sin(9 * t)
    problem = bl.Problem(
        residual=lambda w, lam, data: lam.exp() * (w[0] * torch.exp(-w[1] * data[0]) - data[1]),
        outer=lambda w, lam, data: (w**2).sum(),
        init=lambda lam: torch.ones(2),
    )
    lam, task = torch.linspace(-1, 1, 12), bl.Task((t, y), None)
    run = {"dynamics": bl.LevenbergMarquardt(), "steps": 1}
    found = bl.hypergradient(problem, lam, task, method=bl.Implicit(), **run)
    newton = {"dynamics": bl.GradientDescent(0.01), "steps": 1, "method": bl.Implicit(newton=1e-12)}
    exact = bl.hypergradient(problem, lam, task, start=found.inner, **newton)
    assert relative_error(found.inner, exact.inner) < 1e-6 and relative_error(found.grad, exact.grad) < 1e-5
    assert 1 < found.stats.iterations < 50

    def value(lam):
        return bl.hypergradient(problem, lam, task, start=found.inner, **newton).value

    assert relative_error(exact.grad, central_differences(value, lam)) < 1e-6
    with pytest.raises(bl.BilevelError, match=r"Problem\(residual=…"):
        other, lam, task = logistic()
        bl.hypergradient(other, lam, task, method=bl.Implicit(), **run)


def test_levenberg_and_marquardt_for_a_root_that_picard_does_not_find():
    problem = bl.Problem(
        root=lambda w, lam, _: torch.stack([w[0] ** 2 + w[1] ** 2 - lam, w[0] - w[1]]),
        outer=lambda w, lam, _: w[0],
        init=lambda lam: torch.tensor([1.0, 0.5]),
    )
    lam, task = torch.tensor(3.0), bl.Task(None, None)
    run = {"dynamics": bl.LevenbergMarquardt(), "steps": 1, "method": bl.Implicit()}
    found = bl.hypergradient(problem, lam, task, **run)
    root = (lam / 2).sqrt()
    assert relative_error(found.value, root) < 1e-9 and relative_error(found.grad, 0.25 / root) < 1e-7


def lasso():
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(30, 8, generator=generator), torch.randn(30, generator=generator)
    problem = bl.Problem(
        inner=lambda w, lam, data: 0.5 * ((data[0] @ w - data[1]) ** 2).mean(),
        outer=lambda w, lam, data: (w**2).sum(),
        init=lambda lam: torch.zeros(8),
    )
    return problem, bl.Task((x, y), None)


@pytest.mark.parametrize(
    "penalty",
    [
        bl.L1(0.05),
        bl.GroupL2(0.05, (0, 0, 1, 1, 2, 2, 3, 3)),
        bl.Indicator(bl.Ball(0.3)),
        bl.Indicator(bl.Box(-0.1, 0.2)),
        bl.Indicator(bl.Simplex()),
    ],
    ids=str,
)
def test_the_duality_gap_bounds_the_distance_from_the_minimum(penalty):
    problem, task = lasso()

    def value(w):
        return float(problem.inner(w, None, task.train) + penalty.value(w))

    dynamics = bl.FISTA(0.3, penalty)
    with torch.no_grad():
        w = penalty.prox(torch.zeros(8), 0.3)
        iterates, state = [w], dynamics.init(w)
        for t in range(1, 600):
            w, state = dynamics.step(lambda w: problem.inner(w, None, task.train), w, state, t)
            iterates.append(w)
        least = value(w)
        for w in iterates[1:60:7] + iterates[-1:]:
            slope = bl.gradient(lambda w: problem.inner(w, None, task.train), w)
            gap = float(penalty.duality_gap(w, trees.detach(slope), problem.inner(w, None, task.train)))
            assert value(w) - least <= gap + 1e-12
        assert gap < 1e-6


def test_fista_stops_at_its_gap():
    problem, task = lasso()
    lam = torch.full((8,), -3.0)
    run = {"dynamics": lambda lam: bl.Until(bl.FISTA(0.3, bl.L1(lam.exp())), gap=1e-14), "steps": 2000}
    found = bl.hypergradient(problem, lam, task, method=bl.Implicit(), **run)
    assert 10 < found.stats.iterations < 2000
    exact = {"dynamics": lambda lam: bl.ISTA(0.3, bl.L1(lam.exp())), "steps": 600}
    assert relative_error(found.grad, bl.hypergradient(problem, lam, task, **exact).grad) < 1e-5


@pytest.mark.parametrize("dynamics", [bl.LineSearch(), bl.Until(bl.GradientDescent(1.0), tol=1e-3)], ids=str)
@pytest.mark.parametrize("method", [bl.Truncated(5), bl.FiniteDifference(k=5)], ids=str)
def test_the_last_steps_of_a_dynamics_that_stops_are_not_enough(dynamics, method):
    problem, lam, task = logistic()
    with pytest.raises(bl.BilevelError, match=rf"{type(method).__name__}\(k=5\) .* may stop"):
        bl.hypergradient(problem, lam, task, dynamics=dynamics, steps=50, method=method)


def test_refusals():
    for arguments in ({}, {"tol": 1e-3, "gap": 1e-3}):
        with pytest.raises(bl.BilevelError, match="either tol or gap"):
            bl.Until(bl.FISTA(0.1, bl.L1(0.1)), **arguments)
    with pytest.raises(bl.BilevelError, match="no duality gap"):
        bl.Until(bl.GradientDescent(0.1), gap=1e-3)
    with pytest.raises(bl.BilevelError, match="L ≥ 0"):
        bl.L1(0.1).duality_gap(torch.ones(2), torch.ones(2), torch.tensor(-1.0))
    with pytest.raises(bl.BilevelError, match="support"):
        bl.Indicator(bl.NonNegative()).duality_gap(torch.ones(2), torch.ones(2), torch.tensor(1.0))
    with pytest.raises(bl.BilevelError, match="is not possible"):
        bl.LineSearch(shrink=1.5)
