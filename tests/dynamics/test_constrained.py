"""`Projected`, `Polyhedron` and quadratic programs: closed forms, differences, and degenerate active sets."""

import pytest
import torch

import bilevel as bl
from bilevel.hypergradients import value_of
from bilevel.testing import central_differences, relative_error

TASK = bl.Task(None, None)


def quadratic_program():
    """min ½wᵀQw + λᵀw subject to G w ≤ h; two of the four rows are active at the solution."""
    generator = torch.Generator().manual_seed(4)
    noise = torch.randn(5, 5, generator=generator)
    q = noise @ noise.T / 5 + torch.eye(5)
    lam = {
        "q": torch.randn(5, generator=generator),
        "G": torch.randn(4, 5, generator=generator),
        "h": torch.full((4,), 0.1),
    }
    u = torch.randn(5, generator=generator)
    problem = bl.Problem(
        inner=lambda w, lam, _: 0.5 * w @ q @ w + lam["q"] @ w,
        outer=lambda w, lam, _: (u @ w) + (w**2).sum(),
        init=lambda lam: torch.zeros(5),
    )

    def dynamics(lam):
        return bl.Projected(bl.GradientDescent(0.3), bl.Polyhedron(lam["G"], lam["h"]))

    return problem, lam, dynamics, q


def by_kkt(problem, lam, q, active):
    """The outer objective of the solution of the KKT system with these active rows."""
    rows = lam["G"][active]
    zeros = torch.zeros(len(rows), len(rows))
    system = torch.cat([torch.cat([q, rows.T], 1), torch.cat([rows, zeros], 1)])
    solved = torch.linalg.solve(system, torch.cat([-lam["q"], lam["h"][active]]))
    return problem.outer(solved[:5], lam, None), solved


@pytest.mark.parametrize("method", [bl.Implicit(), bl.Implicit(bl.GMRES(1e-13)), bl.Reverse(), bl.Forward()], ids=str)
def test_a_quadratic_program_against_its_kkt_system(method):
    problem, lam, dynamics, q = quadratic_program()
    found = bl.hypergradient(problem, lam, TASK, dynamics=dynamics, steps=200, method=method)
    slack = lam["h"] - lam["G"] @ found.inner
    active = torch.nonzero(slack.abs() < 1e-8)[:, 0]
    assert 0 < len(active) < 4 and bool((slack > -1e-10).all())
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in lam.items()}
    value, solved = by_kkt(problem, leaves, q, active)
    assert bool((solved[5:] > 1e-3).all())  # the multipliers of the active rows
    exact = dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))
    assert relative_error(found.value, value.detach()) < 1e-9 and relative_error(found.grad, exact) < 1e-7


def test_a_quadratic_program_against_differences():
    problem, lam, dynamics, _ = quadratic_program()
    call = {"dynamics": dynamics, "steps": 60}
    found = bl.hypergradient(problem, lam, TASK, method=bl.Implicit(), **call).grad
    numbers = central_differences(lambda lam: value_of(problem, lam, TASK, **call), lam)
    assert relative_error(found, numbers) < 1e-6


def test_equations_and_inequalities_together():
    """The projection onto {x ≥ 0, Σ x = 1} is that onto the simplex, with its derivative."""
    x = torch.tensor([0.9, 0.7, -1.0, 0.1])
    set_ = bl.Polyhedron(-torch.eye(4), torch.zeros(4), torch.ones(1, 4), torch.ones(1))
    assert relative_error(set_.project(x), bl.Simplex().project(x)) < 1e-12
    slopes = [torch.autograd.functional.jacobian(one.project, x) for one in (set_, bl.Simplex())]
    assert relative_error(*slopes) < 1e-12


@pytest.mark.parametrize("dynamics", [bl.GradientDescent(0.2), bl.HeavyBall(0.1, 0.5)], ids=str)
@pytest.mark.parametrize("constraint", [bl.Simplex(), bl.Ball(0.5), bl.Box(-0.1, 0.2), bl.NonNegative()], ids=str)
def test_projected_steps_are_differentiated_at_their_limit(constraint, dynamics):
    problem = bl.Problem(
        lambda w, lam, _: (torch.cosh(w - lam) + 0.3 * (w - lam) ** 2).sum() + 0.2 * (w[0] - w[1]) ** 2,
        lambda w, lam, _: (w**3).sum() + w[0],
        lambda lam: torch.full((4,), 0.25),
    )
    lam = torch.tensor([0.9, 0.4, -1.0, 0.3])
    call = {"dynamics": bl.Projected(dynamics, constraint), "steps": 120}
    found = bl.hypergradient(problem, lam, TASK, method=bl.Implicit(), **call).grad
    assert relative_error(found, bl.hypergradient(problem, lam, TASK, **call).grad) < 1e-8
    numbers = central_differences(lambda lam: value_of(problem, lam, TASK, **call), lam)
    assert relative_error(found, numbers) < 1e-6


@pytest.mark.parametrize(
    "dynamics",
    [
        bl.Projected(bl.GradientDescent(0.2), bl.Box(0.0, 1.0)),
        bl.ISTA(0.2, bl.Indicator(bl.NonNegative())),
        bl.Projected(bl.GradientDescent(0.2), bl.Polyhedron(-torch.eye(2).double(), torch.zeros(2).double())),
    ],
    ids=str,
)
def test_a_degenerate_active_set_is_warned_about(dynamics):
    """For λ = 0 the minimiser of (w − λ)² is on the bound, whose multiplier is zero: left and right slopes differ."""
    problem = bl.Problem(
        lambda w, lam, _: ((w - lam) ** 2).sum(), lambda w, lam, _: w.sum(), lambda lam: torch.full((2,), 0.5)
    )
    call = {"dynamics": dynamics, "steps": 100, "method": bl.Implicit()}
    with pytest.warns(bl.BilevelWarning, match="degenerate active set"):
        bl.hypergradient(problem, torch.tensor([0.5, 0.0]), TASK, **call)
    found = bl.hypergradient(problem, torch.tensor([0.5, -0.1]), TASK, **call).grad
    assert relative_error(found, torch.tensor([1.0, 0.0])) < 1e-8


def test_refusals():
    with pytest.raises(bl.BilevelError, match="empty set"):
        rows = torch.tensor([[1.0], [-1.0]])
        bl.Polyhedron(rows, torch.tensor([0.0, -1.0])).project(torch.zeros(1))
    with pytest.raises(bl.BilevelError, match="shapes"):
        bl.Polyhedron(torch.eye(2), torch.zeros(3))
    with pytest.raises(bl.BilevelError, match="no rows"):
        bl.Polyhedron()
    with pytest.raises(bl.BilevelError, match="linearly dependent"):
        twice = torch.ones(2, 3)
        bl.Polyhedron(A=twice, b=torch.ones(2)).project(torch.zeros(3))
    with pytest.raises(bl.BilevelError, match="FISTA"):
        bl.Projected(bl.Adam(0.1), bl.Simplex())
    with pytest.raises(bl.BilevelError, match="has no set"):
        bl.Projected(bl.GradientDescent(0.1), 3)
    with pytest.raises(bl.BilevelError, match="has no set"):
        bl.Projected(bl.GradientDescent(0.1), bl.Simplex)


@pytest.mark.parametrize("momentum", [torch.tensor([0.1, 0.5, 0.8]), {"w": torch.tensor([0.1, 0.5, 0.8])}], ids=type)
def test_a_momentum_for_every_weight_moves_the_limit_on_a_simplex(momentum):
    """At rest the velocity is −lr/(1 − momentum)·∇L, and the projection weighs its entries against each other."""
    bare = (lambda w: w) if isinstance(momentum, torch.Tensor) else (lambda w: w["w"])
    start = torch.ones(3) / 3
    problem = bl.Problem(
        lambda w, lam, _: (torch.tensor([1.0, 2.0, 4.0]) * (bare(w) - lam) ** 2).sum(),
        lambda w, lam, _: (torch.tensor([1.0, -2.0, 0.5]) * bare(w)).sum(),
        lambda lam: start if isinstance(momentum, torch.Tensor) else {"w": start},
    )
    run = {"dynamics": bl.Projected(bl.HeavyBall(0.05, momentum), bl.Simplex()), "steps": 1000}
    lam = torch.tensor([0.5, 0.6, 0.3])
    right = bl.hypergradient(problem, lam, TASK, **run).grad
    found = bl.hypergradient(problem, lam, TASK, method=bl.Implicit(), **run).grad
    assert relative_error(found, right) < 1e-8


@pytest.mark.parametrize("method", [bl.Reverse(), bl.Forward(), bl.Implicit()], ids=str)
def test_a_learned_bound_that_is_not_active_at_the_start(method):
    """The first steps stay inside of the ball, where its radius does not matter."""
    problem = bl.Problem(
        lambda w, lam, _: ((w - torch.tensor([3.0, 4.0])) ** 2).sum(),
        lambda w, lam, _: w[0],
        lambda lam: torch.zeros(2),
    )
    run = {"dynamics": lambda lam: bl.Projected(bl.GradientDescent(0.05), bl.Ball(lam)), "steps": 100}
    found = bl.hypergradient(problem, torch.tensor(2.0), TASK, method=method, **run)
    assert relative_error(found.grad, torch.tensor(0.6)) < 1e-8
