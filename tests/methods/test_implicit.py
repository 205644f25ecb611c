"""Implicit methods against the closed form, on proximal dynamics, with warm starts."""

import pytest
import torch

import bilevel as bl
from bilevel import trees
from bilevel.hypergradients import value_of
from bilevel.testing import central_differences, relative_error
from bilevel.testing.problems import closed_form, examples

SOLVERS = [
    bl.CG(tol=1e-13),
    bl.Neumann(terms=600),
    bl.FixedPoint(tol=1e-13),
    bl.Nystrom(rank=5),
    bl.Direct(),
    bl.CG(preconditioner=bl.Nystrom(rank=2, damping=0.8)),
]


def quadratic():
    example = examples()[0]
    base, start = example.problem, example.lam["start"]
    problem = bl.Problem(base.inner, base.outer, lambda lam: base.init({"start": start}))
    return (
        problem,
        {k: example.lam[k] for k in ("penalty", "shift")},
        example.task,
        {k: closed_form(example)[1][k] for k in ("penalty", "shift")},
    )


# CG and Nystrom need a symmetric map, which the heavy ball's is not; that they refuse it is tested elsewhere.
CASES = [(solver, "auto") for solver in SOLVERS]
CASES += [(solver, "fixed-point") for solver in SOLVERS if not isinstance(solver, (bl.CG, bl.Nystrom))]


@pytest.mark.parametrize(("solver", "condition"), CASES, ids=lambda value: str(value)[:20])
def test_the_closed_form(solver, condition):
    problem, lam, task, expected = quadratic()
    method = bl.Implicit(solver, condition=condition)
    result = bl.hypergradient(problem, lam, task, dynamics=bl.HeavyBall(0.3, 0.5), steps=300, method=method)
    assert relative_error(result.grad, expected) < 1e-8
    assert result.stats.residual is not None and result.stats.residual < 1e-8


@pytest.mark.parametrize("dynamics", [bl.ISTA, bl.FISTA])
def test_proximal_dynamics_through_their_fixed_point(dynamics):
    """A Lasso: λ sets the penalties inside Φ, and ∇L is not zero at the solution."""
    torch.manual_seed(3)
    x, y = torch.randn(20, 6), torch.randn(20)
    problem = bl.Problem(
        lambda w, lam, b: 0.5 * ((b[0] @ w - b[1]) ** 2).mean(),
        lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean(),
        lambda lam: torch.zeros(6),
    )
    lam, task = torch.full((6,), -2.0), bl.Task((x, y), (x.flip(0), y + 0.1))
    step = lambda lam: dynamics(0.3, bl.L1(lam.exp()))  # noqa: E731
    settings = {"dynamics": step, "steps": 3000}
    result = bl.hypergradient(problem, lam, task, method=bl.Implicit(bl.Direct()), **settings)
    assert 0 < int((result.inner == 0).sum()) < 6
    expected = central_differences(lambda lam: value_of(problem, lam, task, **settings), lam)
    assert relative_error(result.grad, expected) < 1e-6
    assert relative_error(bl.hypergradient(problem, lam, task, method=bl.Implicit(), **settings).grad, expected) < 1e-6


def test_a_warm_start_saves_products():
    problem, lam, task, _ = quadratic()
    settings = {"dynamics": bl.HeavyBall(0.3, 0.5), "steps": 300}
    first = bl.hypergradient(problem, lam, task, method=bl.Implicit(bl.FixedPoint(tol=1e-10)), **settings)
    again = bl.hypergradient(
        problem,
        lam,
        task,
        method=bl.Implicit(bl.FixedPoint(tol=1e-10)),
        adjoint=first.adjoint,
        start=first.inner,
        **settings,
    )
    assert again.stats.products < first.stats.products - 20
    assert relative_error(again.grad, first.grad) < 1e-8


def test_a_solver_that_stops_early_says_so():
    problem, lam, task, expected = quadratic()
    with pytest.warns(bl.BilevelWarning, match="residual"):
        result = bl.hypergradient(
            problem,
            lam,
            task,
            dynamics=bl.HeavyBall(0.3, 0.5),
            steps=300,
            method=bl.Implicit(bl.CG(tol=1e-12, max_iter=1)),
        )
    assert result.stats.residual > 1e-3
    assert relative_error(result.grad, expected) > 1e-6


def test_a_matrix_too_large_for_direct_is_refused():
    with pytest.raises(bl.BilevelError, match="limit is 3"):
        bl.Direct(largest=3).solve(lambda v: v, torch.ones(4))


def test_a_step_size_drops_out_at_a_fixed_point_and_is_refused():
    problem, lam, task, _ = quadratic()
    lam = {**lam, "lr": torch.tensor(-1.5)}
    cases = [
        (lambda lam: bl.GradientDescent(lam["lr"].exp()), bl.Implicit(bl.Direct(), condition="fixed-point")),
        (lambda lam: bl.ISTA(lam["lr"].exp(), bl.L1(0.01)), bl.Implicit()),
    ]
    for dynamics, method in cases:
        with pytest.raises(bl.BilevelError, match=r"cannot see λ\['lr'\]"):
            bl.hypergradient(problem, lam, task, dynamics=dynamics, steps=20, method=method)


def test_a_weight_that_the_inner_objective_ignores():
    problem, lam, task, expected = quadratic()
    wider = bl.Problem(problem.inner, problem.outer, lambda lam: {**problem.init(lam), "c": torch.ones(2)})
    for solver in (bl.FixedPoint(tol=1e-12), bl.Neumann(600)):
        found = bl.hypergradient(
            wider, lam, task, dynamics=bl.HeavyBall(0.3, 0.5), steps=300, method=bl.Implicit(solver)
        )
        assert relative_error(found.grad, expected) < 1e-8


def test_nystrom_needs_a_symmetric_map():
    problem, lam, task, _ = quadratic()
    with pytest.raises(bl.BilevelError, match="Nystrom was given a map that is not symmetric"):
        method = bl.Implicit(bl.Nystrom(5), condition="fixed-point")
        bl.hypergradient(problem, lam, task, dynamics=bl.HeavyBall(0.3, 0.5), steps=50, method=method)


def test_minibatches_are_warned_about():
    problem, lam, task, _ = quadratic()
    batches = bl.Task(bl.Minibatches(task.train, 5), task.val)
    with pytest.warns(bl.BilevelWarning, match="last step"):
        bl.hypergradient(problem, lam, batches, dynamics=bl.GradientDescent(0.1), steps=5, method=bl.Implicit())


def test_single_precision_stops_where_it_can():
    problem, lam, task, expected = quadratic()
    single = lambda tree: trees.map(lambda x: x.float(), tree)  # noqa: E731
    narrow = bl.Problem(problem.inner, problem.outer, lambda lam: single(problem.init(lam)))
    for solver in (None, bl.FixedPoint()):
        found = bl.hypergradient(
            narrow,
            single(lam),
            bl.Task(single(task.train), single(task.val)),
            dynamics=bl.HeavyBall(0.3, 0.5),
            steps=300,
            method=bl.Implicit(solver),
        )
        assert found.stats.products < 500 and relative_error(found.grad, single(expected)) < 1e-4


def test_an_adjoint_of_another_problem_is_refused():
    problem, lam, task, _ = quadratic()
    with pytest.raises(bl.BilevelError, match="adjoint has shape"):
        bl.hypergradient(
            problem, lam, task, dynamics=bl.GradientDescent(0.1), steps=5, method=bl.Implicit(), adjoint=torch.ones(3)
        )
