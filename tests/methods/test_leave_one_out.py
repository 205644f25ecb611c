"""The closed form of the leave-one-out error: against fits that leave a row out, differences and other methods."""

import pytest
import torch

import bilevel as bl
from bilevel.structures import LeastSquares, LeaveOneOut, LinearModels
from bilevel.structures.penalties import GroupPenalties

STILL = {"dynamics": bl.GradientDescent(0.01), "steps": 1}


def table(rows, features, intercept, outputs=2):
    """X and y about their weighted means where there is an intercept, the weights, and the intercept's leverage."""
    torch.manual_seed(0)
    X, y = torch.randn(rows, features).double() + 1, torch.randn(outputs, rows).double()
    weight = torch.rand(rows).double() + 0.5
    share = weight / weight.sum()
    raw = X, y, weight
    if intercept:
        X, y = X - share @ X, y - (y @ share)[:, None]
    return raw, (X, y, weight, share if intercept else torch.zeros_like(share))


def problems(rows, features, intercept, penalty, freedom=0.0):
    """The same problem from sums and from rows, with the method for each."""
    raw, (X, y, weight, own) = table(rows, features, intercept)
    val = (X, y, weight, own, torch.tensor(0.1).double())
    outer = LeaveOneOut(penalty, lambda lam, c: c * lam.square().sum(), freedom)
    init = lambda lam: torch.zeros(1, 2, features, dtype=torch.float64)  # noqa: E731
    sums = ((X.T @ (X * weight[:, None]))[None], ((y * weight) @ X)[None])
    yield raw, bl.Problem(LeastSquares(penalty), outer, init), bl.Task(sums, val), bl.NormalEquations()
    yield (
        raw,
        bl.Problem(LinearModels(penalty=penalty), outer, init),
        bl.Task((X, y, weight[None]), val),
        bl.KernelEquations(),
    )


def errors_of_refits(X, y, weight, alpha, intercept):
    """½ Σ s ‖y_i − prediction of the fit without row i‖² / Σ s."""
    total = 0.0
    for i in range(len(X)):
        rest = torch.arange(len(X)) != i
        s = weight[rest]
        x_mean = s @ X[rest] / s.sum() if intercept else torch.zeros(X.shape[1]).double()
        y_mean = y[:, rest] @ s / s.sum() if intercept else torch.zeros(len(y)).double()
        A, b = X[rest] - x_mean, y[:, rest] - y_mean[:, None]
        w = torch.linalg.solve(A.T @ (A * s[:, None]) + alpha.diag(), A.T @ (b * s).T)
        total += weight[i] * ((X[i] - x_mean) @ w + y_mean - y[:, i]).square().sum()
    return 0.5 * total / weight.sum()


def degrees_of_freedom(X, weight, alpha):
    gram = X.T @ (X * weight[:, None])
    return torch.linalg.solve(gram + alpha.diag(), gram).trace()


@pytest.mark.parametrize(("intercept", "freedom"), [(True, 0.0), (False, 0.0), (True, 0.7)])
@pytest.mark.parametrize(("rows", "features"), [(25, 6), (12, 20)])
def test_the_closed_form_is_the_error_of_refits(rows, features, intercept, freedom):
    lam = torch.randn(features).double()
    penalty = GroupPenalties(features)
    for (X, y, weight), problem, task, method in problems(rows, features, intercept, penalty, freedom):
        found = bl.hypergradient(problem, lam, task, method=method, **STILL)
        price = freedom * degrees_of_freedom(task.val[0], weight, lam.exp()) / weight.sum()
        wanted = errors_of_refits(X, y, weight, lam.exp(), intercept) + price + 0.1 * lam.square().sum()
        torch.testing.assert_close(found.value, wanted, rtol=1e-10, atol=0)
        implicit = bl.hypergradient(problem, lam, task, method=bl.Implicit(bl.Direct(), newton=1e-11), **STILL)
        torch.testing.assert_close(found.grad, implicit.grad, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(found.inner, implicit.inner, rtol=1e-8, atol=1e-10)

        def value(point, problem=problem, task=task, method=method):
            return float(bl.hypergradient(problem, point, task, method=method, **STILL).value)

        step = 1e-5 * torch.eye(features).double()
        slopes = torch.tensor([(value(lam + d) - value(lam - d)) / 2e-5 for d in step]).double()
        torch.testing.assert_close(found.grad, slopes, rtol=1e-6, atol=1e-8)


def test_a_matrix_of_penalties_is_differentiated_like_numbers():
    torch.manual_seed(1)
    roots = torch.randn(3, 6, 6).double()
    matrices = roots @ roots.mT

    def penalty(lam):
        return torch.tensordot(lam.exp(), matrices, 1)

    lam = torch.randn(3).double()
    ((_, problem, task, method), _) = problems(25, 6, True, penalty)
    found, wanted = (
        bl.hypergradient(problem, lam, task, method=m, **STILL)
        for m in (method, bl.Implicit(bl.Direct(), newton=1e-11))
    )
    torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-8, atol=1e-10)
    plain = bl.Problem(problem.inner, lambda w, lam, batch: (w - 1).square().sum(), problem.init)
    found, wanted = (
        bl.hypergradient(plain, lam, task, method=m, **STILL) for m in (method, bl.Implicit(bl.Direct(), newton=1e-11))
    )
    torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-8, atol=1e-10)


def test_penalties_of_another_function_are_left_to_autograd():
    """The closed form holds for the penalties of the inner objective; an outer one with others is another function."""
    ((_, problem, task, method), _) = problems(25, 6, True, GroupPenalties(6))
    other = bl.Problem(problem.inner, LeaveOneOut(lambda lam: 2 * lam.exp(), problem.outer.extra), problem.init)
    lam = torch.randn(6).double()
    found, wanted = (
        bl.hypergradient(other, lam, task, method=m, **STILL) for m in (method, bl.Implicit(bl.Direct(), newton=1e-11))
    )
    torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-8, atol=1e-10)


def test_one_penalty_may_stand_for_all_features():
    _, by_rows = problems(12, 4, False, torch.exp)
    _, problem, task, method = by_rows
    lam = torch.tensor(0.3)
    methods = method, bl.Implicit(bl.Direct(), newton=1e-11)
    found, wanted = (bl.hypergradient(problem, lam, task, method=m, **STILL) for m in methods)
    each = bl.hypergradient(problem, torch.full((4,), 0.3), task, method=method, **STILL)
    torch.testing.assert_close(found.inner, each.inner)
    torch.testing.assert_close(found.value - 0.1 * 0.09, each.value - 0.4 * 0.09)
    torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-7, atol=1e-9)
