"""Whole outer problems: the optimum that a grid, scipy or a closed form finds is found by following hypergradients."""

import numpy as np
import pytest
import scipy.optimize
import torch
from comparing import agree, classification, close, draw, minimiser, regression, slope, squares, zeros
from torch import nn
from torch.nn.functional import softplus

import bilevel as bl

TASK = regression(15, 4, seed=1)


def ridge(w, lam, data):
    return squares(w, lam, data) + 0.5 * (lam.exp() * w**2).sum()


PROBLEM = bl.Problem(ridge, squares, zeros(4))


def exact(lam):
    x, y = TASK.train
    return squares(torch.linalg.solve(x.T @ x / 15 + torch.diag(lam.exp().expand(4)), x.T @ y / 15), None, TASK.val)


def best():
    """The smallest validation error of exact ridges with λ between −6 and 1, by scipy."""

    def both(z):
        found = slope(exact, torch.as_tensor(z))
        return found.value, found.grad.numpy()

    return scipy.optimize.minimize(both, np.zeros(4), jac=True, bounds=[(-6, 1)] * 4, method="L-BFGS-B", tol=1e-14).fun


@pytest.mark.parametrize(
    "start, steps, method",
    [
        ("cold", 80, None),
        ("cold", 150, bl.Spectral()),
        ("warm", 30, bl.Implicit()),
        ("cold", 1, lambda k: bl.Implicit(bl.CG(tol=0.1 * 0.8**k), newton=0.1 * 0.8**k)),
        ("warm", 1, lambda k: bl.Implicit(bl.CG(tol=0.1 * 0.8**k), newton=max(1e-10, 0.1 * 0.8**k))),
    ],
    ids=["reverse", "spectral", "warm starts", "falling tolerances", "falling tolerances and warm starts"],
)
def test_a_penalty_for_each_feature_reaches_the_optimum_of_scipy(start, steps, method):
    solution = bl.solve(
        PROBLEM,
        torch.zeros(4),
        TASK,
        dynamics=bl.GradientDescent(0.3),
        steps=steps,
        method=method,
        start=start,
        constraint=bl.Box(-6, 1),
        optimizer=lambda params: torch.optim.Adam(params, lr=0.4, betas=(0.7, 0.99)),
        iterations=60,
        progress=False,
    )
    assert float(exact(solution.outer)) == pytest.approx(best(), rel=1e-3)


def test_logistic_regression_finds_the_best_penalty_of_a_grid():
    task = classification(40, 4, seed=2)
    error = lambda w, data: softplus(-(2 * data[1] - 1) * (data[0] @ w)).mean()  # noqa: E731
    inner = lambda w, lam, data: error(w, data) + 0.5 * lam.exp() * (w**2).sum()  # noqa: E731

    def judged(lam):
        w = minimiser(lambda w, lam: inner(w, lam, task.train), torch.zeros(4), lam)
        return float(error(w.detach(), task.val))

    grid = min(judged(torch.tensor(z)) for z in np.linspace(-6, 2, 17))
    solution = bl.solve(
        bl.Problem(inner, lambda w, lam, data: error(w, data), zeros(4)),
        torch.tensor(0.0),
        task,
        dynamics=bl.GradientDescent(1.0),
        steps=1,
        method=lambda k: bl.Implicit(bl.CG(tol=0.1 * 0.8**k), newton=0.1 * 0.8**k),
        start="warm",
        optimizer=lambda params: torch.optim.Adam(params, lr=0.4),
        iterations=50,
        progress=False,
    )
    assert judged(solution.outer) < grid + 1e-5


@pytest.mark.parametrize("method", [bl.Forward(), bl.Reverse(), bl.Truncated(3)], ids=lambda m: type(m).__name__)
def test_online_tuning_in_a_single_inner_run(method):
    """Real-time hyperparameter optimisation: the inner run never begins again, and λ comes close to its optimum."""
    solution = bl.solve(
        PROBLEM,
        torch.zeros(4),
        TASK,
        dynamics=bl.GradientDescent(0.3),
        steps=5,
        method=method,
        start="online",
        constraint=bl.Box(-6, 1),
        optimizer=lambda params: torch.optim.Adam(params, lr=0.2),
        iterations=120,
        progress=False,
    )
    before, after, optimum = float(exact(torch.zeros(4))), float(exact(solution.outer)), best()
    assert after - optimum < 0.15 * (before - optimum)


def test_a_single_loop_that_moves_all_three_variables_a_little():
    """w, the adjoint and λ each take a small step from where they were, as stochastic single-loop methods do."""
    lam, w, adjoint = torch.zeros(4), torch.zeros(4), None
    for _ in range(300):
        found = bl.hypergradient(
            PROBLEM,
            lam,
            TASK,
            dynamics=bl.GradientDescent(0.3),
            steps=1,
            start=w,
            adjoint=adjoint,
            method=bl.Implicit(bl.CG(tol=1e-3, max_iter=20)),
        )
        lam, w, adjoint = lam - 0.5 * found.grad, found.inner, found.adjoint
    assert float(exact(lam)) < 0.5 * float(exact(torch.zeros(4))) + 0.5 * best()


def test_lbfgs_with_a_line_search_outside():
    lam = torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.LBFGS([lam], max_iter=40, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        f = bl.objective(PROBLEM, lam, TASK, dynamics=bl.GradientDescent(0.3), steps=200, method=bl.Spectral())
        (f + 1e-2 * (lam**2).sum()).backward()
        return f.detach() + 1e-2 * (lam.detach() ** 2).sum()

    optimizer.step(closure)

    def both(z):
        found = slope(lambda lam: exact(lam) + 1e-2 * (lam**2).sum(), torch.as_tensor(z))
        return found.value, found.grad.numpy()

    optimum = scipy.optimize.minimize(both, np.zeros(4), jac=True, tol=1e-12)
    close(lam.detach(), torch.as_tensor(optimum.x), 1e-3)


@pytest.mark.parametrize("case", ["scaled", "added to itself", "of a network's output", "one of two leaves frozen"])
def test_the_objective_in_a_graph_of_the_users(case):
    run = {"dynamics": bl.GradientDescent(0.3), "steps": 12}
    lam = draw(4).requires_grad_()
    plain = bl.hypergradient(PROBLEM, lam.detach(), TASK, **run).grad
    if case == "scaled":
        (3 * bl.objective(PROBLEM, lam, TASK, **run)).backward()
        close(lam.grad, 3 * plain, 1e-12)
    elif case == "added to itself":
        for _ in range(2):
            bl.objective(PROBLEM, lam, TASK, **run).backward()
        close(lam.grad, 2 * plain, 1e-12)
    elif case == "of a network's output":
        layer = nn.Linear(4, 4).double()
        bl.objective(PROBLEM, layer(lam), TASK, **run).backward()
        upstream = bl.hypergradient(PROBLEM, layer(lam).detach(), TASK, **run).grad
        close(lam.grad, layer.weight.detach().T @ upstream, 1e-12)
        close(layer.bias.grad, upstream, 1e-12)
    else:
        problem = bl.Problem(lambda w, lam, data: ridge(w, lam["a"] + lam["b"], data), squares, zeros(4))
        frozen = {"a": lam, "b": torch.zeros(4)}
        bl.objective(problem, frozen, TASK, **run).backward()
        close(lam.grad, plain, 1e-12)


def test_cross_validation_fold_by_fold_and_all_at_once():
    cv = bl.CrossValidation(TASK.train, folds=5)
    lam, run = draw(4), {"dynamics": bl.GradientDescent(0.3), "steps": 20}

    def plain(lam):
        total = 0.0
        for task in cv.tasks:
            (x, y), w = task.train, torch.zeros(4)
            for _ in range(20):
                w = w - 0.3 * (x.T @ (x @ w - y) / len(y) + lam.exp() * w)
            total = total + squares(w, None, task.val)
        return total / 5

    expected = slope(plain, lam)
    agree(expected, PROBLEM, lam, cv.tasks, tolerance=1e-10, **run)
    stacked, task = cv.batched(PROBLEM)
    agree(expected, stacked, lam, task, tolerance=1e-10, **run)


def test_weights_on_the_simplex_choose_the_sources_of_data():
    """Two of three sources are wrong; the weights, kept on the simplex, go to the right one."""
    x, true = draw(30, 3), torch.tensor([1.0, -1.0, 0.5])
    y = x @ true
    y[10:20] += 4
    y[20:] *= -1
    source = torch.arange(3).repeat_interleave(10)
    problem = bl.Problem(
        lambda w, lam, data: (lam[source] * (x @ w - y) ** 2).mean() + 1e-3 * (w**2).sum(),
        lambda w, lam, data: ((data[0] @ w - data[1]) ** 2).mean(),
        zeros(3),
    )
    z = draw(20, 3, seed=1)
    solution = bl.solve(
        problem,
        torch.full((3,), 1 / 3),
        bl.Task(None, (z, z @ true)),
        dynamics=bl.GradientDescent(0.3),
        steps=100,
        method=bl.Spectral(),
        constraint=bl.Simplex(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.2),
        iterations=60,
        progress=False,
    )
    close(solution.outer, torch.tensor([1.0, 0.0, 0.0]), 1e-2)


def test_tasks_drawn_anew_carry_w_from_one_to_the_next():
    """A source that returns the same task at every k is that task, with w carried over."""
    settings = {"dynamics": bl.GradientDescent(0.3), "steps": 5, "start": "warm", "iterations": 3, "progress": False}
    drawn = bl.solve(PROBLEM, torch.zeros(4), iter([TASK] * 4), **settings)
    fixed = bl.solve(PROBLEM, torch.zeros(4), TASK, **settings)
    close(drawn.outer, fixed.outer, 1e-12)
    cold = bl.solve(PROBLEM, torch.zeros(4), TASK, **{**settings, "start": "cold"})
    assert not torch.allclose(drawn.outer, cold.outer)
