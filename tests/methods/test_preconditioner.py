"""Implicit(preconditioner=…): the same numbers from fewer products, whatever the preconditioner is worth."""

import pytest
import torch

import bilevel as bl
from bilevel.testing import central_differences, relative_error

FEATURES = 40
ONE = {"dynamics": bl.GradientDescent(0.01), "steps": 1}


def classifier():
    """Logistic regression on features of very different scales, w and λ as trees."""
    torch.manual_seed(5)
    x = torch.randn(400, FEATURES) * torch.logspace(-2, 1, FEATURES)
    y = (x.sum(1) + torch.randn(400) > 0).double()
    loss = torch.nn.functional.binary_cross_entropy_with_logits

    def logits(w, data):
        return data[0][:, :30] @ w["a"] + data[0][:, 30:] @ w["b"].flatten()

    def inner(w, lam, data):
        return loss(logits(w, data), data[1]) + 0.5 * sum((lam[k].exp() * w[k] ** 2).sum() for k in lam)

    problem = bl.Problem(
        inner,
        lambda w, lam, data: loss(logits(w, data), data[1]),
        lambda lam: {k: torch.zeros_like(v) for k, v in lam.items()},
    )
    lam = {"a": torch.full((30,), -6.0), "b": torch.full((5, 2), -4.0)}
    return problem, lam, bl.Task((x[:300], y[:300]), (x[300:], y[300:]))


def from_rows(w, lam, task):
    """A factor of the Hessian at w on every other row, penalties included."""
    x = task.train[0][::2]
    p = torch.sigmoid(x[:, :30] @ w["a"] + x[:, 30:] @ w["b"].flatten())
    penalties = torch.cat([lam["a"], lam["b"].flatten()]).exp()
    factor = torch.linalg.cholesky((x.T * p * (1 - p)) @ x / len(x) + penalties.diag())

    def inverse(v):
        flat = torch.cat([v["a"], v["b"].flatten()])
        found = torch.cholesky_solve(flat[:, None], factor)[:, 0]
        return {"a": found[:30], "b": found[30:].reshape(5, 2)}

    return inverse


def run(preconditioner=None, lam=None, tol=1e-12, **more):
    problem, start, task = classifier()
    method = bl.Implicit(bl.CG(tol=tol), newton=tol, preconditioner=preconditioner)
    return bl.hypergradient(problem, start if lam is None else lam, task, method=method, **ONE, **more)


def test_the_same_hypergradient_from_fewer_products():
    plain, fast = run(), run(from_rows)
    assert relative_error(fast.grad, plain.grad) < 1e-10
    assert relative_error(fast.inner, plain.inner) < 1e-10
    assert fast.stats.residual < 1e-11
    assert fast.stats.products < 0.5 * plain.stats.products


def test_it_is_the_gradient_of_the_value():
    problem, lam, task = classifier()
    method = bl.Implicit(bl.CG(tol=1e-12), newton=1e-12, preconditioner=from_rows)

    def along(size):
        moved = {k: v + size * torch.linspace(-1, 1, v.numel()).reshape(v.shape) for k, v in lam.items()}
        return bl.hypergradient(problem, moved, task, method=method, **ONE)

    expected = central_differences(lambda size: along(size).value, torch.zeros(()), step=1e-4)
    slope = sum(
        (g * torch.linspace(-1, 1, g.numel()).reshape(g.shape)).sum() for g in along(torch.zeros(())).grad.values()
    )
    assert relative_error(slope, expected) < 1e-6


@pytest.mark.parametrize("newton", [None, 1e-9])
def test_it_is_built_once_at_the_point_that_the_steps_lead_to(newton):
    problem, lam, task = classifier()
    calls = []

    def seen(w, lam, task):
        calls.append((w, lam, task))
        return from_rows(w, lam, task)

    bl.hypergradient(problem, lam, task, method=bl.Implicit(bl.CG(1e-6), newton=newton, preconditioner=seen), **ONE)
    ((w, at, data),) = calls
    expected = bl.hypergradient(problem, lam, task, method=bl.Unrolled(), **ONE).inner
    assert relative_error(w, expected) < 1e-14 and relative_error(at, lam) == 0
    assert data.train[0].data_ptr() == task.train[0].data_ptr()  # large data is not copied
    assert not any(leaf.requires_grad for leaf in (*w.values(), *at.values()))


@pytest.mark.parametrize("seed", range(3))
def test_one_that_has_nothing_to_do_with_the_hessian_costs_products_and_no_digits(seed):
    half = torch.randn(FEATURES, FEATURES, generator=torch.Generator().manual_seed(seed))
    senseless = half @ half.T / FEATURES + torch.eye(FEATURES)

    def inverse(v):
        found = senseless @ torch.cat([v["a"], v["b"].flatten()])
        return {"a": found[:30], "b": found[30:].reshape(5, 2)}

    found = run(lambda w, lam, task: inverse)
    assert relative_error(found.grad, run().grad) < 1e-9


def test_a_factor_in_single_precision_will_do():
    def inverse(w, lam, task):
        exact = from_rows(w, lam, task)
        return lambda v: {k: x.float().double() for k, x in exact(v).items()}

    assert relative_error(run(inverse).grad, run().grad) < 1e-9


def test_solve_takes_it_with_tolerances_that_fall(counted_checks):
    problem, lam, task = classifier()
    spent, ends = {}, {}
    for name, preconditioner in (("plain", None), ("fast", from_rows)):
        products = []
        ends[name] = bl.solve(
            problem,
            lam,
            task,
            method=lambda k, f=preconditioner: bl.Implicit(
                bl.CG(tol=1e-2 * 0.1**k),
                newton=1e-2 * 0.1**k,
                preconditioner=None if f is None else lambda w, lam, task: f(w, lam, task),
            ),
            start="warm",
            iterations=8,
            optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
            callbacks=[lambda it, seen=products: seen.append(it.hypergradient.stats.products) or False],
            **ONE,
        ).outer
        spent[name] = sum(products)
    assert relative_error(ends["fast"], ends["plain"]) < 1e-2
    assert spent["fast"] < 0.5 * spent["plain"]
    # A function made anew at every hyperiteration is no reason to check the problem again.
    assert len(counted_checks) <= 6


def on_one_side(w, lam, task):
    """Half of a Cholesky solution, the usual slip."""
    factor = torch.eye(FEATURES) + torch.rand(FEATURES, FEATURES, generator=torch.Generator().manual_seed(0)).tril()

    def inverse(v):
        flat = torch.cat([v["a"], v["b"].flatten()])
        found = torch.linalg.solve_triangular(factor, flat[:, None], upper=False)[:, 0]
        return {"a": found[:30], "b": found[30:].reshape(5, 2)}

    return inverse


REFUSED = [
    (on_one_side, "not symmetric.*cholesky_solve"),
    (lambda w, lam, task: lambda v: v["a"], "a tree like w"),
    (lambda w, lam, task: lambda v: {"a": v["b"], "b": v["a"]}, r"'a'.*\[5, 2\].*\[30\]"),
    (lambda w, lam, task: lambda v: {"a": v["a"], "b": None}, "a tree like w"),
    (lambda w, lam, task: lambda v: {k: -x for k, x in v.items()}, "not positive definite"),
    (lambda w, lam, task: lambda v: {k: x * float("nan") for k, x in v.items()}, "not positive definite"),
    (lambda w, lam, task: lambda v: {k: 0 * x for k, x in v.items()}, "not positive definite"),
    (lambda w, lam, task: torch.eye(FEATURES), "must return a function"),
    (torch.eye(FEATURES), "is not a function of"),
]


@pytest.mark.parametrize(("preconditioner", "words"), REFUSED)
def test_nonsense_is_refused(preconditioner, words):
    with pytest.raises(bl.BilevelError, match=words):
        run(preconditioner, tol=1e-6)


@pytest.mark.parametrize("solver", [bl.Direct(), bl.Neumann(10), bl.CG(preconditioner=bl.Nystrom(4))])
def test_solvers_that_would_not_use_it_are_refused(solver):
    problem, lam, task = classifier()
    with pytest.raises(bl.BilevelError, match="preconditioner"):
        bl.hypergradient(problem, lam, task, method=bl.Implicit(solver, preconditioner=from_rows), **ONE)


def test_a_fixed_point_is_refused():
    problem, lam, task = classifier()
    method = bl.Implicit(condition="fixed-point", preconditioner=from_rows)
    with pytest.raises(bl.BilevelError, match="preconditioner"):
        bl.hypergradient(problem, lam, task, method=method, **ONE)
