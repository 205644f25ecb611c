"""Quadratics given by their matrices: what is refused, gradients in the matrices, minimisers that are not unique."""

from dataclasses import dataclass, replace

import pytest
import torch

import bilevel as bl
from bilevel.methods.dual_descent import DualDescent
from bilevel.structures import GramOfRows, HeldOutSquares, LeastSquares, LinearClassifiers

STILL = {"dynamics": bl.GradientDescent(0.01), "steps": 1}
LASSO = {"dynamics": bl.ISTA(0.01, bl.L1(0.3)), "steps": 1}


def quadratic(penalty=torch.exp, shift=0.0):
    """A problem with one fold, a goal for w, and the matrix G + shift·I."""
    rows = torch.randn(6, 3)
    problem = bl.Problem(
        LeastSquares(penalty), lambda w, lam, goal: ((w - goal) ** 2).sum(), lambda lam: torch.zeros(1, 1, 3)
    )
    return problem, bl.Task(((rows.T @ rows + shift * torch.eye(3))[None], torch.randn(1, 1, 3)), torch.randn(1, 1, 3))


@pytest.mark.parametrize(("method", "settings"), [(bl.NormalEquations(), STILL), (bl.ActiveSet(), LASSO)])
def test_a_quadratic_without_a_minimum_is_refused(method, settings):
    problem, task = quadratic(lambda lam: lam)
    bl.hypergradient(problem, torch.tensor([-1e-3, 1.0, 1.0]), task, method=method, **settings)  # G has a larger one
    for penalties in ([-50.0, 1, 1], [1.0, 1, -50]):
        with pytest.raises(bl.BilevelError, match=r"has no minimum.* Use penalties ≥ 0"):
            bl.hypergradient(problem, torch.tensor(penalties), task, method=method, **settings)
    problem, task = quadratic(shift=-20.0)
    with pytest.raises(bl.BilevelError, match="has no minimum"):
        bl.hypergradient(problem, torch.zeros(3), task, method=method, **settings)
    # Penalties that make up for a G with a negative eigenvalue.
    bl.hypergradient(problem, torch.full((3,), 4.0), task, method=method, **settings)


def test_rows_of_a_lasso_with_a_negative_penalty_are_refused():
    problem, task = quadratic(lambda lam: lam)
    rows = bl.Task((GramOfRows(torch.randn(6, 3), torch.ones(1, 6), torch.zeros(1, 3)), task.train[1]), task.val)
    for given, dynamics in ((-1.0, LASSO["dynamics"]), (1.0, bl.ISTA(0.01, bl.L1(torch.tensor([0.1, 0.1, -0.1]))))):
        with pytest.raises(bl.BilevelError, match="has no minimum"):
            bl.hypergradient(problem, torch.full((3,), given), rows, method=bl.ActiveSet(), dynamics=dynamics, steps=1)


@pytest.mark.parametrize("encoded", [False, True])
def test_the_gradient_in_a_matrix_of_penalties_is_that_of_implicit_differentiation(encoded):
    problem, task = quadratic(lambda lam: lam)
    if encoded:  # λ is G
        (_, moments), goal = task.train, task.val
        problem = bl.Problem(
            LeastSquares(lambda lam: torch.ones(3)),
            problem.outer,
            problem.init,
            lambda lam, task: bl.Task((lam[None], moments), goal),
        )
    lam = torch.eye(3) + 0.1
    found, wanted = (
        bl.hypergradient(problem, lam, task, method=m, **STILL)
        for m in (bl.NormalEquations(), bl.Implicit(bl.Direct(), newton=1e-11))
    )
    torch.testing.assert_close(found.value, wanted.value)
    torch.testing.assert_close(found.grad, wanted.grad)
    torch.testing.assert_close(found.grad, found.grad.T)


def test_matrices_that_are_not_symmetric_are_refused():
    corner = torch.triu(torch.ones(3, 3), 1)
    problem, task = quadratic(lambda lam: lam)
    with pytest.raises(bl.BilevelError, match=r"penalty\(λ\) of a LeastSquares is not symmetric"):
        bl.hypergradient(problem, torch.eye(3) + corner, task, method=bl.NormalEquations(), **STILL)
    with pytest.raises(bl.BilevelError, match="not a matrix"):
        bl.hypergradient(problem, torch.eye(3), task, method=bl.ActiveSet(), **LASSO)
    problem, task = quadratic()
    skew = bl.Task((task.train[0] + 0.5 * corner, task.train[1]), task.val)
    for method, settings in ((bl.NormalEquations(), STILL), (bl.ActiveSet(), LASSO)):
        with pytest.raises(bl.BilevelError, match=r"G of a LeastSquares is not symmetric. Pass .*A.mT"):
            bl.hypergradient(problem, torch.zeros(3), skew, method=method, **settings)
    outer = HeldOutSquares(lambda lam, c: c * lam.sum())
    skew = bl.Task(task.train, (task.train[0] + 0.5 * corner, task.train[1], torch.ones(()), torch.zeros(())))
    with pytest.raises(bl.BilevelError, match="G of the outer objective is not symmetric"):
        bl.hypergradient(
            bl.Problem(problem.inner, outer, problem.init), torch.zeros(3), skew, method=bl.NormalEquations(), **STILL
        )


def test_a_lasso_with_equal_columns_warns_where_the_outer_objective_depends_on_the_solution():
    """As `Implicit` does. An objective of the scores alone has the same value at all solutions, and a gradient."""
    rows = torch.randn(6, 2)
    rows = torch.cat([rows, rows[:, :1]], 1)
    y, lam = torch.randn(6), torch.zeros(3)
    gram, moments = (rows.T @ rows)[None], (y @ rows)[None, None]
    settings = {"dynamics": lambda lam: bl.ISTA(0.02, bl.L1(0.1 * lam.exp())), "steps": 1, "method": bl.ActiveSet()}

    def problem(outer):
        return bl.Problem(LeastSquares(lambda lam: torch.zeros(3)), outer, lambda lam: torch.zeros(1, 1, 3))

    depends = problem(lambda w, lam, goal: ((w - goal) ** 2).sum())
    starts = {"both": None, "one": torch.tensor([[[-0.2, 0.5, 0.0]]])}
    for start in starts.values():
        with pytest.warns(bl.BilevelWarning, match="The minimiser is not unique"):
            bl.hypergradient(depends, lam, bl.Task((gram, moments), torch.randn(1, 1, 3)), start=start, **settings)
    scores = problem(lambda w, lam, goal: ((w @ rows.T - goal) ** 2).sum())
    found = bl.hypergradient(scores, lam, bl.Task((gram, moments), torch.randn(1, 1, 6)), **settings)
    assert bool(torch.isfinite(found.grad).all())


@dataclass(frozen=True)
class Bent(LeastSquares):
    def __call__(self, w, lam, batch):
        return super().__call__(w, lam, batch) + (w**4).sum()


@dataclass(frozen=True)
class Further(LinearClassifiers):
    def __call__(self, w, lam, batch):
        return super().__call__(w, lam, batch) + (w**2).sum()


@dataclass(frozen=True)
class Bounded(HeldOutSquares):
    def __call__(self, w, lam, batch):
        return super().__call__(w, lam, batch) + (w**2).sum()


@dataclass(frozen=True)
class BoundedDescent(bl.ISTA):
    def step(self, loss, w, state, t):
        w, state = super().step(loss, w, state, t)
        return w.clamp(min=0.1), state


@dataclass(frozen=True)
class ShiftedL1(bl.L1):
    def prox(self, w, step, t=1):
        return 0.1 + super().prox(w - 0.1, step, t)


def test_a_subclass_with_a_further_term_is_another_objective():
    """Methods for the class would leave the term out."""
    problem, task = quadratic()
    bent = replace(problem, inner=Bent())
    for method, settings in ((bl.NormalEquations(), STILL), (bl.ActiveSet(), LASSO)):
        with pytest.raises(bl.BilevelError, match="is another function"):
            bl.hypergradient(bent, torch.zeros(3), task, method=method, **settings)
    for dynamics in (BoundedDescent(0.01, bl.L1(0.3)), bl.ISTA(0.01, ShiftedL1(0.3))):
        with pytest.raises(bl.BilevelError, match="proximal dynamics with an L1 penalty"):
            bl.hypergradient(problem, torch.zeros(3), task, dynamics=dynamics, steps=1, method=bl.ActiveSet())
    features, labels = torch.randn(2, 4, 3), torch.arange(8).reshape(2, 4) % 3
    heads = bl.Problem(
        Further(),
        lambda w, lam, b: (b[0] @ w).square().mean(),
        lambda lam: torch.zeros(2, 3, 3),
        lambda lam, t: bl.Task((t.train[0] * lam, t.train[1]), t.val),
    )
    given = bl.Task((features, labels), (features + 1, labels))
    with pytest.raises(bl.BilevelError, match="is another function"):
        bl.hypergradient(heads, torch.ones(3), given, dynamics=bl.GradientDescent(0.1), steps=3, method=DualDescent())


def test_a_subclass_of_a_declared_outer_objective_is_differentiated_by_autograd():
    problem, task = quadratic()
    gram, moments = task.train
    held = bl.Task(task.train, (gram, moments, torch.ones(()), None))
    added = replace(problem, outer=Bounded(lambda lam, data: lam.sum()))
    exact = {"dynamics": bl.GradientDescent(0.02), "steps": 4000, "method": bl.Implicit()}
    right = bl.hypergradient(added, torch.zeros(3), held, **exact)
    found = bl.hypergradient(added, torch.zeros(3), held, method=bl.NormalEquations(), **STILL)
    torch.testing.assert_close(found.value, right.value, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.grad, right.grad, rtol=1e-6, atol=1e-9)
