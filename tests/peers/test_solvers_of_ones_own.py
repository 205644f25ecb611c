"""w comes from a solver of the user's, and maps that do not contract: what implicit differentiation can still do."""

from dataclasses import dataclass

import pytest
import scipy.optimize
import torch
from comparing import NO_DATA, agree, classification, close, minimiser, regression, slope, squares, zeros
from test_implicit_roots import logistic

import bilevel as bl

TASK = classification(30, 4)
PROBLEM = bl.Problem(logistic, lambda w, lam, data: logistic(w, torch.tensor(-50.0), data), zeros(4))
LAM = torch.tensor(-1.5)


def expected():
    fit = lambda lam: minimiser(lambda w, lam: logistic(w, lam, TASK.train), torch.zeros(4), lam)  # noqa: E731
    return slope(lambda lam: PROBLEM.outer(fit(lam), lam, TASK.val), LAM)


def by_scipy():
    def value_and_slope(w):
        found = slope(lambda w: logistic(w, LAM, TASK.train), torch.as_tensor(w))
        return found.value, found.grad.numpy()

    return torch.as_tensor(scipy.optimize.minimize(value_and_slope, [0.0] * 4, jac=True, tol=1e-12).x)


def by_torch_lbfgs():
    w = torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [w], max_iter=200, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure():
        optimizer.zero_grad()
        loss = logistic(w, LAM, TASK.train)
        loss.backward()
        return loss

    optimizer.step(closure)
    return w.detach()


def by_newton():
    return minimiser(lambda w, lam: logistic(w, lam, TASK.train), torch.zeros(4), LAM).detach()


@pytest.mark.parametrize("solver", [by_scipy, by_torch_lbfgs, by_newton])
def test_a_minimiser_from_elsewhere_is_differentiated_after_one_step(solver):
    agree(
        expected(),
        PROBLEM,
        LAM,
        TASK,
        dynamics=bl.GradientDescent(1.0),
        steps=1,
        start=solver(),
        methods=[bl.Implicit(bl.CG(tol=1e-13)), bl.Implicit(bl.Direct()), bl.Implicit(bl.CG(tol=1e-13), newton=1e-12)],
        tolerance=1e-6,
    )


def test_a_warm_start_gives_what_a_long_run_gives():
    run = {"dynamics": bl.GradientDescent(1.5), "method": bl.Implicit(bl.CG(tol=1e-13))}
    first = bl.hypergradient(PROBLEM, LAM, TASK, steps=100, **run)
    again = bl.hypergradient(PROBLEM, LAM, TASK, steps=100, start=first.inner, adjoint=first.adjoint, **run)
    close(again.grad, expected().grad, 1e-9)
    assert again.stats.products <= first.stats.products


@dataclass(frozen=True)
class Affine(bl.Dynamics):
    """w ← A w + b: where A expands, the steps diverge and the fixed point is there all the same."""

    matrix: torch.Tensor
    offset: torch.Tensor

    def step(self, loss, w, state, t):
        return self.stationary_step(loss, w, t), state

    def stationary_step(self, loss, w, t):
        return self.matrix @ w + self.offset


EXPANDING = torch.tensor([[1.4, -0.9, 0.1], [0.8, 0.2, -1.3], [0.3, 1.1, -0.6]], dtype=torch.float64)
AFFINE = bl.Problem(lambda w, lam, data: (w**2).sum(), lambda w, lam, data: (w**3).sum(), zeros(3))


def at_the_fixed_point(lam):
    return torch.linalg.solve(torch.eye(3) - EXPANDING, lam)


def ask(solver):
    lam = torch.tensor([0.3, -0.2, 0.5])
    return bl.hypergradient(
        AFFINE,
        lam,
        NO_DATA,
        dynamics=lambda lam: Affine(EXPANDING, lam),
        steps=1,
        start=at_the_fixed_point(lam),
        method=bl.Implicit(solver),
    ).grad


def test_a_map_that_expands_by_a_direct_solver():
    lam = torch.tensor([0.3, -0.2, 0.5])
    close(ask(bl.Direct()), slope(lambda lam: (at_the_fixed_point(lam) ** 3).sum(), lam).grad, 1e-10)


@pytest.mark.parametrize("solver", [bl.FixedPoint(max_iter=200), bl.CG()], ids=["fixed-point iteration", "CG"])
def test_a_map_that_expands_is_refused_by_solvers_that_cannot(solver):
    with pytest.raises(bl.BilevelError):
        ask(solver)


def test_a_map_that_expands_makes_a_neumann_series_diverge():
    with pytest.raises(bl.BilevelError, match="The Neumann series diverges"):
        ask(bl.Neumann(terms=30))


def test_ridge_whose_hessian_is_nearly_singular():
    """More columns than rows and a penalty of 1e-6: a direct solver is right, and warns of its residual."""
    task, lam = regression(6, 8), torch.tensor(-14.0)
    x, y = task.train
    hessian = lambda lam: x.T @ x / 6 + lam.exp() * torch.eye(8)  # noqa: E731
    fit = lambda lam: torch.linalg.solve(hessian(lam), x.T @ y / 6)  # noqa: E731
    with pytest.warns(bl.BilevelWarning, match="residual"):
        agree(
            slope(lambda lam: squares(fit(lam), lam, task.val), lam),
            bl.Problem(lambda w, lam, data: squares(w, lam, data) + 0.5 * lam.exp() * (w**2).sum(), squares, zeros(8)),
            lam,
            task,
            dynamics=bl.GradientDescent(0.1),
            steps=1,
            start=fit(lam),
            methods=[bl.Implicit(bl.Direct())],
            tolerance=1e-5,
        )
