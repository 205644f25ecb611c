"""`Problem(fixed_point=…)` and `Problem(root=…)`: closed forms, differences, and every way to differentiate them."""

import dataclasses

import pytest
import torch

import bilevel as bl
from bilevel.hypergradients import value_of
from bilevel.testing import central_differences, relative_error

TASK = bl.Task(None, None)
SOLVERS = [None, bl.GMRES(tol=1e-13), bl.BiCGSTAB(tol=1e-13), bl.NormalCG(tol=1e-13), bl.Direct()]


def affine(scale):
    """w = A w + b·λ, with the closed form λ (I − A)⁻¹ b. A is not symmetric; `scale` is its spectral radius."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(6, 6, generator=generator)
    a = scale * noise / torch.linalg.eigvals(noise).abs().max()
    b, u = torch.randn(6, generator=generator), torch.randn(6, generator=generator)
    problem = bl.Problem(
        fixed_point=lambda w, lam, _: lam["a"] @ w + lam["b"] * b,
        outer=lambda w, lam, _: (u @ w) ** 2,
        init=lambda lam: torch.zeros(6),
    )
    lam = {"a": a, "b": torch.tensor(0.7)}

    def value(lam):
        return (u @ torch.linalg.solve(torch.eye(6) - lam["a"], lam["b"] * b)) ** 2

    leaves = {name: leaf.clone().requires_grad_() for name, leaf in lam.items()}
    exact = torch.autograd.grad(value(leaves), list(leaves.values()))
    return problem, lam, dict(zip(leaves, exact, strict=True))


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
@pytest.mark.parametrize("dynamics", [bl.Picard(), bl.Picard(0.8), bl.Anderson()], ids=str)
def test_a_contraction_against_its_closed_form(dynamics, solver):
    problem, lam, exact = affine(0.6)
    found = bl.hypergradient(problem, lam, TASK, dynamics=dynamics, steps=120, method=bl.Implicit(solver))
    assert relative_error(found.grad, exact) < 1e-8
    assert found.stats.residual < 1e-9


@pytest.mark.parametrize("method", [bl.Reverse(), bl.Forward(), bl.Unrolled(), "auto"], ids=str)
def test_exact_methods_differentiate_the_steps(method):
    problem, lam, exact = affine(0.6)
    found = bl.hypergradient(problem, lam, TASK, dynamics=bl.Picard(), steps=120, method=method)
    assert relative_error(found.grad, exact) < 1e-8
    call = {"dynamics": bl.Anderson(memory=2, ridge=1e-4), "steps": 5}
    found = bl.hypergradient(problem, lam, TASK, method=method, **call).grad
    numbers = central_differences(lambda lam: value_of(problem, lam, TASK, **call), lam)
    assert relative_error(found, numbers) < 1e-6


@pytest.mark.parametrize("solver", [bl.GMRES(tol=1e-13), bl.BiCGSTAB(tol=1e-13), bl.NormalCG(tol=1e-13)], ids=str)
def test_a_map_that_does_not_contract(solver):
    """Picard diverges and says what to use; Anderson converges; FixedPoint would not solve the linear system."""
    problem, lam, exact = affine(3.0)
    run = {"dynamics": bl.Anderson(memory=6), "steps": 60}
    found = bl.hypergradient(problem, lam, TASK, method=bl.Implicit(solver), **run)
    assert relative_error(found.grad, exact) < 1e-7
    with pytest.raises(bl.BilevelError, match="FixedPoint diverged"):
        bl.hypergradient(problem, lam, TASK, method=bl.Implicit(bl.FixedPoint()), **run)
    with pytest.raises(bl.BilevelError, match="not symmetric"):
        bl.hypergradient(problem, lam, TASK, method=bl.Implicit(bl.CG()), **run)
    with pytest.raises(bl.DivergenceError, match="Anderson"):
        bl.hypergradient(problem, lam, TASK, dynamics=bl.Picard(), steps=2000)


def test_a_root_is_the_fixed_point_of_w_minus_it():
    """w³ + λw = 2, whose derivative in λ is −w/(3w² + λ)."""
    problem = bl.Problem(
        root=lambda w, lam, _: w**3 + lam * w - 2, outer=lambda w, lam, _: w**2, init=lambda lam: torch.ones(())
    )
    lam = torch.tensor(0.7)
    for dynamics in (bl.Picard(0.2), bl.Anderson(), bl.GradientDescent(0.02)):
        found = bl.hypergradient(problem, lam, TASK, dynamics=dynamics, steps=400, method=bl.Implicit())
        w = found.inner
        assert abs(float(w**3 + lam * w - 2)) < 1e-9
        assert relative_error(found.grad, -2 * w * w / (3 * w**2 + lam)) < 1e-8


def test_a_singular_fixed_point_is_refused():
    """Every w is a fixed point of w = w + 0: the solution is not isolated."""
    problem = bl.Problem(
        fixed_point=lambda w, lam, _: w * torch.tensor([1.0, 0.5]) + lam,
        outer=lambda w, lam, _: w.sum(),
        init=lambda lam: torch.zeros(2),
    )
    with pytest.raises(bl.BilevelError, match="singular"):
        run = {"dynamics": bl.Picard(), "steps": 100, "method": bl.Implicit()}
        bl.hypergradient(problem, torch.tensor([0.0, 1.0]), TASK, **run)


def test_the_solution_is_a_layer_with_second_derivatives():
    problem, lam, _ = affine(0.4)
    b = torch.tensor(0.7, requires_grad=True)
    w = bl.inner_solution(problem, {"a": lam["a"], "b": b}, TASK, dynamics=bl.Picard(), steps=60)
    (slope,) = torch.autograd.grad((w**2).sum(), b, create_graph=True)
    (curvature,) = torch.autograd.grad(slope, b)
    assert relative_error(slope.detach(), 2 * (w.detach() ** 2).sum() / 0.7) < 1e-9
    assert relative_error(curvature, 2 * (w.detach() ** 2).sum() / 0.49) < 1e-9


def test_data_that_require_grad():
    problem = bl.Problem(
        fixed_point=lambda w, lam, x: 0.5 * torch.tanh(lam * w) + x,
        outer=lambda w, lam, x: (w**2).sum(),
        init=lambda lam: torch.zeros(3),
    )
    x = torch.tensor([0.1, -0.4, 0.3], requires_grad=True)
    value = bl.objective(problem, torch.tensor(0.9), bl.Task(x, None), dynamics=bl.Picard(), steps=80)
    value.backward()
    w = bl.inner_solution(problem, torch.tensor(0.9), bl.Task(x.detach(), None), dynamics=bl.Picard(), steps=80)
    expected = 2 * w / (1 - 0.45 * (1 - torch.tanh(0.9 * w) ** 2))
    assert relative_error(x.grad, expected) < 1e-9


def test_certificates_hold():
    problem, lam, _ = affine(0.6)
    certificate = bl.certify(problem, lam, TASK, dynamics=bl.Picard(), steps=10)
    w = bl.hypergradient(problem, lam, TASK, dynamics=bl.Picard(), steps=10).inner
    limit = bl.hypergradient(problem, lam, TASK, dynamics=bl.Picard(), steps=300).inner
    distance = float((w - limit).norm())
    assert distance <= certificate.inner_distance < 1.1 * distance + 1e-9


def test_bad_problems_and_pairs_are_refused():
    def anything(w, lam, _):
        return (w * lam).sum()

    def zeros(lam):
        return torch.zeros(2)

    for parts in (
        {"inner": anything, "fixed_point": anything},
        {"root": anything, "fixed_point": anything},
        {"root": anything, "residual": anything},
        {},
    ):
        with pytest.raises(bl.BilevelError, match="one of inner, fixed_point, root and residual"):
            bl.Problem(outer=anything, init=zeros, **parts)
    with pytest.raises(bl.BilevelError, match="leaves out init"):
        bl.Problem(anything)
    call = {"dynamics": bl.Picard(), "steps": 3}
    with pytest.raises(bl.BilevelError, match=r"Picard.*Problem\(fixed_point"):
        bl.hypergradient(bl.Problem(anything, anything, zeros), torch.ones(2), TASK, **call)
    scalar = bl.Problem(fixed_point=anything, outer=anything, init=zeros)
    with pytest.raises(bl.BilevelError, match="must return a tree like w"):
        bl.hypergradient(scalar, torch.ones(2), TASK, **call)


def test_a_replaced_problem_keeps_its_equations():
    problem, lam, exact = affine(0.6)
    again = dataclasses.replace(problem, outer=problem.outer)
    found = bl.hypergradient(again, lam, TASK, dynamics=bl.Picard(), steps=120).grad
    assert relative_error(found, exact) < 1e-8
    with pytest.raises(bl.BilevelError, match="one of"):
        dataclasses.replace(problem, fixed_point=lambda w, lam, _: w)
