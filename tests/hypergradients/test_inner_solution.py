"""`inner_solution`: w_T in the caller's graph, by every method, to every order."""

import warnings

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import bilevel as bl
from bilevel import trees
from bilevel.testing import central_differences, relative_error
from bilevel.testing.problems import examples

SETTINGS = {"dynamics": bl.HeavyBall(0.1, 0.3), "steps": 6}


def live(tree):
    return trees.map(lambda leaf: leaf.clone().requires_grad_(), tree)


def ridge():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(12, 4, generator=generator), torch.randn(12, generator=generator)
    problem = bl.Problem(
        inner=lambda w, lam, data: ((data[0] @ w - data[1]) ** 2).mean() + (lam.exp() * w**2).sum(),
        outer=lambda w, lam, data: (w**2).sum(),
        init=lambda lam: torch.zeros(4),
    )
    return problem, torch.linspace(-2, 0, 4), bl.Task((x, y), None)


@pytest.mark.parametrize("method", [bl.Reverse(), bl.Unrolled(), bl.Forward(), "auto"], ids=str)
@pytest.mark.parametrize("index", range(len(examples())), ids=[example.name for example in examples()])
def test_a_loss_of_the_solution_is_the_objective(index, method):
    example = examples()[index]
    lam = live(example.lam)
    bl.objective(example.problem, lam, example.task, method=method, **SETTINGS).backward()
    again = live(example.lam)
    encoded = example.task if example.problem.encode is None else example.problem.encode(again, example.task)
    w = bl.inner_solution(example.problem, again, example.task, method=method, allow_unused=True, **SETTINGS)
    example.problem.outer(w, again, encoded.val).backward()
    found, expected = (trees.map(lambda leaf: leaf.grad, tree) for tree in (again, lam))
    assert relative_error(found, expected) < (1e-4 if trees.leaves(lam)[0].dtype == torch.float32 else 1e-10)


def test_the_closed_form_in_the_limit():
    """Implicit differentiation, two losses, and a λ that a network computes."""
    problem, lam, task = ridge()
    x, y = task.train
    point = lam.clone().requires_grad_()
    w = bl.inner_solution(problem, 2 * point, task, dynamics=bl.GradientDescent(0.2), steps=3000, method=bl.Implicit())
    (w.sum() + (w**3).sum()).backward()
    exact = lam.clone().requires_grad_()
    solved = torch.linalg.solve(x.T @ x / 12 + torch.diag((2 * exact).exp()), x.T @ y / 12)
    (solved.sum() + (solved**3).sum()).backward()
    assert relative_error(w.detach(), solved.detach()) < 1e-9 and relative_error(point.grad, exact.grad) < 1e-8


def test_a_layer_needs_no_outer_objective_and_all_else_says_so():
    whole, lam, task = ridge()
    layer = bl.Problem(inner=whole.inner, init=whole.init)
    point, run = lam.clone().requires_grad_(), {"dynamics": bl.GradientDescent(0.2), "steps": 20}
    for method in (bl.Reverse(), bl.Implicit(), "auto"):
        slopes = []
        for problem in (layer, whole):
            w = bl.inner_solution(problem, point, task, method=method, **run)
            slopes += torch.autograd.grad((w**2).sum(), point, create_graph=method != bl.Implicit())
        assert torch.equal(*slopes)
    (second,) = torch.autograd.grad(slopes[0].sum(), point)
    assert bool(second.isfinite().all())
    calls = (bl.hypergradient, bl.objective, bl.certify, bl.roughness, bl.solve, bl.testing.check_problem)
    for call in calls:
        with pytest.raises(bl.BilevelError, match=r"no outer objective\. inner_solution"):
            call(layer, lam, task, **run)
    with pytest.raises(bl.BilevelError, match=r"no outer objective\. inner_solution"):
        bl.solve(layer, lam, task, algorithm=bl.SOBA())


def test_the_jacobian_and_the_second_derivative():
    problem, lam, task = ridge()
    call = {"dynamics": bl.GradientDescent(0.2), "steps": 20}

    def solution(lam):
        return bl.inner_solution(problem, lam, task, **call)

    jacobian = torch.autograd.functional.jacobian(solution, lam)
    for i in range(4):
        truth = central_differences(lambda lam, i=i: solution(lam.detach())[i], lam)
        assert relative_error(jacobian[i], truth) < 1e-6
    hessian = torch.autograd.functional.hessian(lambda lam: (solution(lam) ** 3).sum(), lam)
    slope = lambda lam: torch.autograd.functional.jacobian(lambda lam: (solution(lam) ** 3).sum(), lam)  # noqa: E731
    for i in range(4):
        truth = central_differences(lambda lam, i=i: slope(lam)[i], lam)
        assert relative_error(hessian[i], truth) < 1e-6


def test_several_tasks_and_data_that_require_grad():
    problem, lam, task = ridge()
    x, y = task.train
    targets = y.clone().requires_grad_()
    tasks = [bl.Task((x, targets), None), bl.Task((x[:8], y[:8]), None)]
    call = {"dynamics": bl.GradientDescent(0.2), "steps": 20}
    one, two = bl.inner_solution(problem, lam.requires_grad_(), tasks, **call)
    (one.sum() * two.sum()).backward()
    grads = [lam.grad.clone(), targets.grad.clone()]
    lam.grad = targets.grad = None

    def plain(train):
        w = torch.zeros(4)
        for _ in range(20):
            w = w - 0.2 * (2 * train[0].T @ (train[0] @ w - train[1]) / len(train[1]) + 2 * lam.exp() * w)
        return w

    (plain(tasks[0].train).sum() * plain(tasks[1].train).sum()).backward()
    assert relative_error(grads, [lam.grad, targets.grad]) < 1e-10


def test_cotangents_in_batches_are_refused():
    problem, lam, task = ridge()
    w = bl.inner_solution(problem, lam.requires_grad_(), task, **SETTINGS)
    with pytest.raises(bl.BilevelError, match="is_grads_batched=True"):
        torch.autograd.grad(w, lam, torch.eye(4), is_grads_batched=True)


def test_where_nothing_requires_grad_nothing_is_recorded():
    problem, lam, task = ridge()
    assert not bl.inner_solution(problem, lam, task, **SETTINGS).requires_grad
    with torch.no_grad():
        assert not bl.inner_solution(problem, lam.requires_grad_(), task, **SETTINGS).requires_grad


def test_refusals():
    problem, lam, task = ridge()
    both = {"used": lam.requires_grad_(), "unused": torch.zeros(2, requires_grad=True)}
    other = bl.Problem(
        lambda w, lam, data: problem.inner(w, lam["used"], data), problem.outer, lambda lam: torch.zeros(4)
    )
    w = bl.inner_solution(other, both, task, **SETTINGS)
    with pytest.raises(bl.BilevelError, match=r"\['unused'\]"):
        w.sum().backward()
    w = bl.inner_solution(other, both, task, allow_unused=True, **SETTINGS)
    w.sum().backward()
    assert torch.equal(both["unused"].grad, torch.zeros(2))

    w = bl.inner_solution(problem, lam, task, method=bl.Truncated(2), **SETTINGS)
    (slope,) = torch.autograd.grad(w.sum(), lam, create_graph=True)
    with pytest.raises(bl.BilevelError, match="second derivative"):
        slope.sum().backward()
    with pytest.raises(bl.BilevelError, match=r"torch.func.grad"):
        torch.func.grad(lambda lam: bl.inner_solution(problem, lam, task, **SETTINGS).sum())(lam.detach())
    with pytest.raises(bl.DivergenceError):
        bl.inner_solution(problem, lam, task, dynamics=bl.GradientDescent(1e3), steps=400)


@pytest.mark.parametrize("live_targets", [False, True])
def test_data_that_change_before_the_backward_pass_are_refused(live_targets):
    problem, lam, task = ridge()
    lam.requires_grad_()
    task.train[1].requires_grad_(live_targets)
    w = bl.inner_solution(problem, lam, task, **SETTINGS)
    (expected,) = torch.autograd.grad((w**2).sum(), lam, retain_graph=True)
    (slope,) = torch.autograd.grad((w**2).sum(), lam, create_graph=True)
    assert torch.equal(slope, expected)
    task.train[0].mul_(2)
    for outputs in ((w**2).sum(), slope.sum()):
        with pytest.raises(bl.BilevelError, match=r"changed in place .* clone"):
            torch.autograd.grad(outputs, lam, retain_graph=True)


@pytest.mark.parametrize("changed", ["array", "number", "sampler"])
@pytest.mark.parametrize("method", [bl.Reverse(), "auto", bl.Implicit()], ids=str)
def test_a_change_between_the_call_and_its_backward_pass_is_refused(changed, method):
    """The backward pass runs the steps again, with whatever the functions read by then."""
    array, numbers, rows = np.ones(3), {"factor": 1.0}, torch.ones(3)
    problem = bl.Problem(
        lambda w, lam, x: numbers["factor"] * ((w - torch.as_tensor(x)) ** 2).sum() + lam.exp() * (w**2).sum(),
        lambda w, lam, x: w.sum(),
        lambda lam: torch.zeros(3),
    )
    task = bl.Task((lambda t: rows) if changed == "sampler" else array, None)

    def change():
        array[:], numbers["factor"] = 3.0, 2.0 if changed == "number" else 1.0
        rows.fill_(3.0)

    lam = torch.tensor(0.1, requires_grad=True)
    call = {"dynamics": bl.GradientDescent(0.1), "steps": 50, "method": method}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bl.BilevelWarning)
        right, found = bl.inner_solution(problem, lam, task, **call), bl.inner_solution(problem, lam, task, **call)
        torch.autograd.grad(right.sum(), lam)
        change()
        with pytest.raises(bl.BilevelError, match="runs the steps again"):
            torch.autograd.grad(found.sum(), lam)


def test_a_change_before_a_second_derivative_is_refused():
    factor = [1.0]
    problem = bl.Problem(
        lambda w, lam, _: factor[0] * (w - 1) ** 2 + lam.exp() * w**2, lambda w, lam, _: w**2, torch.zeros_like
    )
    lam = torch.tensor(0.1, requires_grad=True)
    f = bl.objective(problem, lam, bl.Task(None, None), dynamics=bl.GradientDescent(0.1), steps=5)
    torch.autograd.grad(f, lam, create_graph=True)
    factor[0] = 2.0
    with pytest.raises(bl.BilevelError, match="runs the steps again"):
        (slope,) = torch.autograd.grad(f, lam, create_graph=True)
        torch.autograd.grad(slope, lam)


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_torchs_checkpoint(reentrant):
    """A part of a network that is run again in the backward pass, where saved tensors can be read once only."""
    problem, lam, task = ridge()

    def of_solution(lam):
        return bl.inner_solution(problem, 2 * lam, task, **SETTINGS).sin().sum()

    def of_value(lam):
        return bl.objective(problem, 2 * lam, task, **SETTINGS).sin()

    for function in (of_solution, of_value):
        point = lam.clone().requires_grad_()
        checkpoint(function, point, use_reentrant=reentrant).backward()
        assert relative_error(point.grad, torch.autograd.functional.jacobian(function, lam)) < 1e-12
        if not reentrant:  # torch has no second derivative of the other kind
            (slope,) = torch.autograd.grad(checkpoint(function, point, use_reentrant=False), point, create_graph=True)
            (found,) = torch.autograd.grad(slope.sum(), point)
            assert relative_error(found, torch.autograd.functional.hessian(function, lam).sum(0)) < 1e-10
