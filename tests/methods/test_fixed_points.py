"""Implicit(condition="fixed-point") on steps that are functions of λ, and Implicit() on a w of one's own solver."""

import pytest
import torch

import bilevel as bl
from bilevel import trees
from bilevel.hypergradients import value_of
from bilevel.testing import central_differences, relative_error

TASK = bl.Task(None, None)


def equilibrium(inner):
    """z = tanh(W z + U x): a layer of infinite depth, with W and U to learn and no objective of its own."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, generator=generator)
    lam = {
        "W": 0.3 * torch.randn(4, 4, generator=generator),
        "U": torch.randn(4, 5, generator=generator),
    }
    problem = bl.Problem(inner, lambda z, lam, _: ((z - 0.5) ** 2).sum(), lambda lam: torch.zeros(4))

    def build(lam):
        def step(loss, z, state, t):
            return torch.tanh(lam["W"] @ z + lam["U"] @ x), state

        return bl.StepFunction(step)

    return problem, lam, {"dynamics": build, "steps": 80}


INNERS = {
    "zeros": lambda z, lam, _: torch.zeros(()),
    "of w": lambda z, lam, _: (z**2).sum(),
    "of λ": lambda z, lam, _: (lam["W"] ** 2).sum(),
}


@pytest.mark.parametrize("solver", [None, bl.FixedPoint(tol=1e-13), bl.Neumann(200), bl.Direct()], ids=str)
@pytest.mark.parametrize("inner", INNERS)
def test_a_deep_equilibrium(inner, solver):
    problem, lam, settings = equilibrium(INNERS[inner])
    method = bl.Implicit(solver, condition="fixed-point")
    found = bl.hypergradient(problem, lam, TASK, method=method, **settings).grad
    assert relative_error(found, bl.hypergradient(problem, lam, TASK, **settings).grad) < 1e-9
    numbers = central_differences(lambda lam: value_of(problem, lam, TASK, **settings), lam)
    assert relative_error(found, numbers) < 1e-6


@pytest.mark.parametrize("inner", INNERS)
def test_without_the_condition_it_is_refused(inner):
    problem, lam, settings = equilibrium(INNERS[inner])
    with pytest.raises(bl.BilevelError):
        bl.hypergradient(problem, lam, TASK, method=bl.Implicit(), **settings)


def test_newtons_method_for_a_root_as_a_step():
    """w³ + λ w = 2, whose derivative in λ is −w/(3 w² + λ)."""

    def build(lam):
        return bl.StepFunction(lambda loss, w, state, t: (w - (w**3 + lam * w - 2) / (3 * w**2 + lam), state))

    problem = bl.Problem(lambda w, lam, _: torch.zeros(()), lambda w, lam, _: w**2, lambda lam: torch.ones(()))
    lam = torch.tensor(0.7)
    found = bl.hypergradient(problem, lam, TASK, dynamics=build, steps=30, method=bl.Implicit(condition="fixed-point"))
    w = found.inner
    assert relative_error(found.grad, -2 * w * w / (3 * w**2 + lam)) < 1e-9


def test_a_step_size_in_a_step_function_still_drops_out():
    lam = {"a": torch.tensor(0.5), "lr": torch.tensor(0.1)}
    problem = bl.Problem(lambda w, lam, _: (w - lam["a"]) ** 2, lambda w, lam, _: w**2, lambda lam: torch.zeros(()))

    def build(lam):
        return bl.StepFunction(lambda loss, w, state, t: (w - lam["lr"] * bl.gradient(loss, w), state))

    for method in (bl.Implicit(), bl.Implicit(condition="fixed-point")):
        with pytest.raises(bl.BilevelError, match=r"cannot see λ\['lr'\]"):
            bl.hypergradient(problem, lam, TASK, dynamics=build, steps=50, method=method)


def test_an_inner_objective_that_is_used_must_depend_on_w():
    problem, lam, _ = equilibrium(INNERS["of λ"])
    for method in (bl.Reverse(), bl.Implicit(), bl.Implicit(condition="fixed-point")):
        with pytest.raises(bl.BilevelError, match="not differentiable in w"):
            bl.hypergradient(problem, lam, TASK, dynamics=bl.GradientDescent(0.1), steps=3, method=method)


def ridge():
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(30, 4, generator=generator), torch.randn(30, generator=generator)
    problem = bl.Problem(
        lambda w, lam, b: ((b[0] @ w["w"] - b[1]) ** 2).mean() + (lam.exp() * w["w"] ** 2).sum(),
        lambda w, lam, b: ((b[0] @ w["w"] - b[1]) ** 2).mean(),
        lambda lam: {"w": torch.zeros(4)},
    )
    lam, task = torch.tensor([-1.0, 0.0, 0.5, 1.0]), bl.Task((x[:20], y[:20]), (x[20:], y[20:]))

    def solved(lam):
        matrix = x[:20].T @ x[:20] / 20 + lam.exp().diag()
        return torch.linalg.solve(matrix, x[:20].T @ y[:20] / 20)

    return problem, lam, task, solved


@pytest.mark.parametrize("dynamics", [bl.GradientDescent(0.1), bl.HeavyBall(0.1), bl.Adam(0.1)], ids=str)
@pytest.mark.parametrize("steps", [0, 1])
def test_the_solution_of_ones_own_solver(steps, dynamics):
    """Ridge regression solved by a linear system, differentiated by the implicit function theorem alone."""
    problem, lam, task, solved = ridge()
    leaf = lam.clone().requires_grad_()
    (expected,) = torch.autograd.grad(problem.outer({"w": solved(leaf)}, leaf, task.val), leaf)
    found = bl.hypergradient(
        problem, lam, task, dynamics=dynamics, steps=steps, start={"w": solved(lam)}, method=bl.Implicit()
    )
    # Adam's first step has the length lr however small the slope is.
    if steps == 0 or not isinstance(dynamics, bl.Adam):
        assert relative_error(found.grad, expected) < 1e-9
    assert found.stats.steps == steps


def test_no_steps_and_an_encoder():
    problem, lam, task, _ = ridge()
    encoded = bl.Problem(
        problem.inner,
        problem.outer,
        problem.init,
        encode=lambda lam, task: bl.Task((task.train[0] * lam.tanh(), task.train[1]), task.val),
    )
    exact = bl.hypergradient(
        encoded, lam, task, dynamics=bl.GradientDescent(0.05), steps=4000, method=bl.Reverse("sqrt")
    )
    found = bl.hypergradient(
        encoded, lam, task, dynamics=bl.GradientDescent(0.05), steps=0, start=exact.inner, method=bl.Implicit()
    )
    assert relative_error(found.grad, exact.grad) < 1e-8


def test_no_steps_and_a_leaf_that_enters_nowhere():
    problem, lam, task, solved = ridge()
    wider = bl.Problem(
        lambda w, lam, b: problem.inner(w, lam[0], b), lambda w, lam, b: problem.outer(w, lam[0], b), problem.init
    )
    call = {"dynamics": bl.GradientDescent(0.1), "steps": 0, "start": {"w": solved(lam)}}
    with pytest.raises(bl.BilevelError, match=r"λ\[1\] reaches neither"):
        bl.hypergradient(wider, [lam, torch.ones(2)], task, method=bl.Implicit(), **call)
    with pytest.raises(bl.BilevelError, match="steps=0"):
        bl.hypergradient(problem, lam, task, method=bl.Reverse(), **call)
    unused = bl.hypergradient(problem, lam, task, method=bl.Reverse(), allow_unused=True, **call)
    assert float(trees.norm(unused.grad)) == 0
