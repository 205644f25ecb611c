"""Fixed points of step functions as inner problems, and minimisers that were found elsewhere, by `Implicit`.

The references are those of the same equations in plain torch: Newton's method, or a linear system.
"""

import torch
from comparing import NO_DATA, agree, slope, zeros
from test_implicit_roots import DEEP, INPUT, WEIGHTS, equilibrium
from test_solvers_of_ones_own import LAM, PROBLEM, TASK, by_newton, expected

import bilevel as bl

AT_REST = (
    bl.Implicit(bl.FixedPoint(tol=1e-13), condition="fixed-point"),
    bl.Implicit(bl.Direct(), condition="fixed-point"),
)


def layer(lam):
    return bl.StepFunction(lambda loss, w, state, t: (torch.tanh(lam @ w + INPUT), state))


def test_a_deep_equilibrium_layer():
    """z = tanh(Wz + x) with W as λ, which enters through the step alone."""
    expected = slope(lambda lam: (equilibrium(lam) ** 3).sum(), WEIGHTS)
    agree(expected, DEEP, WEIGHTS, dynamics=layer, steps=150, methods=AT_REST, tolerance=1e-9)


def test_a_fixed_point_without_an_inner_objective():
    """No step looks at `inner`, so that it may be anything."""
    problem = bl.Problem(lambda w, lam, data: torch.zeros(()), DEEP.outer, zeros(4))
    expected = slope(lambda lam: (equilibrium(lam) ** 3).sum(), WEIGHTS)
    methods = (bl.Unrolled(), bl.Reverse(), bl.Forward(), *AT_REST)
    agree(expected, problem, WEIGHTS, dynamics=layer, steps=150, methods=methods, tolerance=1e-9)


def test_newtons_iteration_for_a_root_as_the_step():
    """w ← w − (w³ + w − λ)/(3w² + 1): at the root the step does not depend on w, only on λ."""
    lam = torch.tensor(1.3)

    def newton(lam):
        return bl.StepFunction(lambda loss, w, state, t: (w - (w**3 + w - lam) / (3 * w**2 + 1), state))

    def root(lam):
        w = torch.tensor(0.5)
        for _ in range(30):
            w = w.detach() - (w.detach() ** 3 + w.detach() - lam) / (3 * w.detach() ** 2 + 1)
        return w

    problem = bl.Problem(lambda w, lam, data: w**2, lambda w, lam, data: w.sin(), lambda lam: torch.tensor(0.5))
    agree(
        slope(lambda lam: root(lam).sin(), lam),
        problem,
        lam,
        dynamics=newton,
        steps=30,
        methods=(bl.Reverse(), *AT_REST),
        tolerance=1e-9,
    )


def test_pagerank_with_a_learned_damping_at_its_fixed_point():
    links = torch.rand(5, 5, generator=torch.Generator().manual_seed(1))
    p, target, lam = links / links.sum(0), torch.linspace(0, 1, 5), torch.tensor(0.8)
    problem = bl.Problem(
        lambda w, lam, data: (w**2).sum(), lambda w, lam, data: target @ w, lambda lam: torch.ones(5) / 5
    )
    agree(
        slope(lambda lam: target @ torch.linalg.solve(torch.eye(5) - lam * p, (1 - lam) / 5 * torch.ones(5)), lam),
        problem,
        lam,
        NO_DATA,
        dynamics=lambda lam: bl.StepFunction(lambda loss, w, state, t: (lam * p @ w + (1 - lam) / 5, state)),
        steps=200,
        methods=AT_REST,
        tolerance=1e-9,
    )


def test_a_minimiser_from_elsewhere_without_a_single_step():
    methods = [bl.Implicit(bl.CG(tol=1e-13)), bl.Implicit(bl.Direct())]
    run = {"dynamics": bl.GradientDescent(1.0), "steps": 0, "start": by_newton()}
    agree(expected(), PROBLEM, LAM, TASK, methods=methods, tolerance=1e-8, **run)
