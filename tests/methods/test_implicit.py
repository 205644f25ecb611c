"""Implicit methods against the closed form, on proximal dynamics, with warm starts."""

import pytest
import torch

import bilevel as bl
from bilevel import trees
from bilevel.hypergradients import value_of
from bilevel.testing import central_differences, relative_error
from bilevel.testing.problems import examples
from quadratic_solution import closed_form

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


@pytest.mark.parametrize(("dynamics", "steps"), [(bl.ISTA, 300), (bl.FISTA, 700)])
def test_proximal_dynamics_through_their_fixed_point(dynamics, steps):
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
    settings = {"dynamics": step, "steps": steps}
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


def classifier(features=6, dtype=torch.float64):
    """Logistic regression with a penalty for each weight, which is not quadratic."""
    torch.manual_seed(4)
    x, true = torch.randn(80, features, dtype=dtype), torch.randn(features, dtype=dtype)
    y = (x @ true + torch.randn(80, dtype=dtype) > 0).to(dtype)
    loss = torch.nn.functional.binary_cross_entropy_with_logits
    problem = bl.Problem(
        lambda w, lam, data: loss(data[0] @ w, data[1]) + 0.5 * (lam.exp() * w**2).sum(),
        lambda w, lam, data: loss(data[0] @ w, data[1]),
        lambda lam: torch.zeros(features, dtype=dtype),
    )
    return problem, torch.full((features,), -3.0, dtype=dtype), bl.Task((x[:40], y[:40]), (x[40:], y[40:]))


EXACT = bl.Implicit(bl.CG(tol=1e-13), newton=1e-12)


def test_newtons_method_solves_the_inner_problem_to_its_tolerance():
    problem, lam, task = classifier()
    one = {"dynamics": bl.GradientDescent(0.5), "steps": 1}
    found = bl.hypergradient(problem, lam, task, method=EXACT, **one)
    long = bl.hypergradient(
        problem, lam, task, dynamics=bl.GradientDescent(2.0), steps=3000, method=bl.Implicit(bl.Direct())
    )
    assert relative_error(found.grad, long.grad) < 1e-10
    assert float(found.value) == pytest.approx(float(long.value), rel=1e-12)
    expected = central_differences(
        lambda lam: bl.hypergradient(problem, lam, task, method=EXACT, **one).value, lam, step=1e-4
    )
    assert relative_error(found.grad, expected) < 1e-6
    for tol in (1e-2, 1e-5):
        loose = bl.hypergradient(problem, lam, task, method=bl.Implicit(bl.CG(), newton=tol), **one)
        w = loose.inner.requires_grad_()
        assert float(torch.autograd.grad(problem.inner(w, lam, task.train), w)[0].norm()) <= tol


def test_newtons_method_comes_back_from_where_its_step_overshoots():
    """Far from the minimiser of a flat loss a full Newton step leads away from it, for ever."""
    problem = bl.Problem(
        lambda w, lam, x: torch.log(torch.cosh(w - 1)) + 1e-3 * lam.exp() * w**2,
        lambda w, lam, x: w**2,
        lambda lam: torch.full((), 4.0),
    )
    found = bl.hypergradient(
        problem, torch.zeros(()), bl.Task(None, None), dynamics=bl.GradientDescent(1e-3), steps=1, method=EXACT
    )
    w = found.inner.requires_grad_()
    assert abs(float(torch.autograd.grad(problem.inner(w, torch.zeros(()), None), w)[0])) <= 1e-12


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e6])
def test_a_stale_or_senseless_start_of_the_adjoint_changes_no_digit_that_counts(scale):
    problem, lam, task = classifier()
    settings = {"dynamics": bl.GradientDescent(0.5), "steps": 1}
    exact = bl.hypergradient(problem, lam, task, method=EXACT, **settings)
    stale = scale * torch.randn(6, generator=torch.Generator().manual_seed(1))
    again = bl.hypergradient(problem, lam, task, method=EXACT, adjoint=stale, start=exact.inner, **settings)
    assert relative_error(again.grad, exact.grad) < 1e-10


def test_tolerances_that_fall_with_the_hyperiteration_reach_the_same_point_in_fewer_products(counted_checks):
    problem, lam, task = classifier()
    spent = {}

    def run(name, method):
        products = []
        sol = bl.solve(
            bl.Problem(problem.inner, problem.outer, problem.init) if name == "tight" else problem,
            lam,
            task,
            dynamics=bl.GradientDescent(0.5),
            steps=1,
            method=method,
            start="warm",
            iterations=60,
            optimizer=lambda params: torch.optim.SGD(params, lr=2.0),
            callbacks=[lambda it: products.append(it.hypergradient.stats.products) or False],
        )
        spent[name] = sum(products)
        return sol.outer

    loose = run("falling", lambda k: bl.Implicit(bl.CG(tol=max(0.1 * 0.8**k, 1e-9)), newton=max(0.1 * 0.8**k, 1e-9)))
    tight = run("tight", EXACT)
    assert relative_error(loose, tight) < 1e-2
    assert spent["falling"] < 0.6 * spent["tight"]
    # Another tolerance is no reason to check the problem again.
    assert len(counted_checks) <= 6


def test_newtons_method_is_refused_where_it_has_no_meaning():
    problem, lam, task = classifier()
    for tol in (0.0, -1.0, True, "tight"):
        with pytest.raises(bl.BilevelError, match="is not a norm of ∇L to stop at"):
            method = bl.Implicit(newton=tol)
            bl.hypergradient(problem, lam, task, dynamics=bl.GradientDescent(0.5), steps=1, method=method)
    with pytest.raises(bl.BilevelError, match="the limits of this dynamics are other points"):
        method = bl.Implicit(newton=1e-6)
        bl.hypergradient(problem, lam, task, dynamics=bl.ISTA(0.5, bl.L1(0.01)), steps=1, method=method)


def test_newtons_method_says_where_it_had_to_stop():
    problem, lam, task = classifier(dtype=torch.float32)
    with pytest.warns(bl.BilevelWarning, match="stopped at ‖∇L‖"):
        bl.hypergradient(
            problem, lam, task, dynamics=bl.GradientDescent(0.5), steps=1, method=bl.Implicit(newton=1e-12)
        )
