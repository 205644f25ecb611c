"""Inner problems with constraints: bounded regressions, simplices, quadratic programs.

A constraint is a `Penalty` whose proximal map is the projection, or a projection in a step function. The references
solve the optimality conditions on the active set, or ask scipy.
"""

import pytest
import scipy.optimize
import torch
from comparing import Within, agree, descent_rate, differences, quadratic_program, regression, slope, squares, zeros

import bilevel as bl

STEPS = (bl.Unrolled(), bl.Reverse(), bl.Forward())
LIMIT = (*STEPS, bl.Implicit(bl.FixedPoint(tol=1e-12)), bl.Implicit(bl.Direct()))


NONNEGATIVE = regression(20, 5, seed=8)


def nnls(x, y):
    return torch.as_tensor(scipy.optimize.nnls(x.numpy(), y.numpy())[0])


def as_penalty(project):
    return bl.ISTA(0.4, Within(project))


def as_step_function(project):
    return lambda loss, w, state, t: (project(w - 0.4 * bl.gradient(loss, w)), state)


@pytest.mark.parametrize("dynamics", [as_penalty, as_step_function])
@pytest.mark.parametrize("learned", ["targets", "table"])
def test_least_squares_with_coefficients_that_are_not_negative(learned, dynamics):
    x, y = NONNEGATIVE.train
    lam = y if learned == "targets" else x
    data = (lambda lam: (x, lam)) if learned == "targets" else (lambda lam: (lam, y))
    assert 0 < int((nnls(x, y) == 0).sum()) < 5
    problem = bl.Problem(lambda w, lam, _: squares(w, lam, data(lam)), squares, zeros(5))
    task = bl.Task(None, NONNEGATIVE.val)
    agree(
        differences(lambda lam: squares(nnls(*data(lam)), None, task.val), lam),
        problem,
        lam,
        task,
        dynamics=dynamics(bl.NonNegative().project),
        steps=200,
        methods=LIMIT if dynamics is as_penalty else (*STEPS, bl.Implicit(condition="fixed-point")),
    )


def test_least_squares_between_learned_bounds():
    x, y = NONNEGATIVE.train
    lam = torch.tensor([-0.1, 0.4])

    def fit(lam):
        bounds = (float(lam[0]), float(lam[1]))
        return torch.as_tensor(scipy.optimize.lsq_linear(x.numpy(), y.numpy(), bounds, method="bvls", tol=1e-15).x)

    expected = differences(lambda lam: squares(fit(lam), None, NONNEGATIVE.val), lam)
    assert int((expected.grad != 0).sum()) == 2
    agree(
        expected,
        bl.Problem(squares, squares, zeros(5)),
        lam,
        NONNEGATIVE,
        dynamics=lambda lam: as_penalty(lambda w: w.clamp(lam[0], lam[1])),
        steps=200,
        methods=LIMIT,
    )


def test_least_squares_in_a_ball_of_learned_radius():
    """(H + νI) w = g with the ν at which ‖w‖ is the radius."""
    x, y = NONNEGATIVE.train
    h, g = x.T @ x / 20, x.T @ y / 20
    at = lambda nu: torch.linalg.solve(h + nu * torch.eye(5), g)  # noqa: E731

    def fit(lam):
        excess = lambda nu: float(at(nu).norm() - lam.exp())  # noqa: E731
        return at(scipy.optimize.brentq(excess, 0, 100, xtol=1e-15, rtol=1e-15))

    lam = torch.tensor(-0.7)
    ball = lambda lam: lambda w: w * (lam.exp() / w.norm()).clamp_max(1)  # noqa: E731
    agree(
        differences(lambda lam: squares(fit(lam), None, NONNEGATIVE.val), lam),
        bl.Problem(squares, squares, lambda lam: torch.ones(5)),
        lam,
        NONNEGATIVE,
        dynamics=lambda lam: as_penalty(ball(lam)),
        steps=200,
        methods=LIMIT,
    )


def test_projection_onto_the_simplex_by_projected_descent():
    lam = torch.tensor([0.9, 0.7, -1.0, 0.5])
    target = torch.tensor([0.1, 0.2, 0.3, 0.4])
    problem = bl.Problem(
        lambda w, lam, data: 0.5 * ((w - lam) ** 2).sum(),
        lambda w, lam, data: ((w - target) ** 2).sum(),
        lambda lam: torch.full((4,), 0.25),
    )

    def fit(lam):  # three numbers stay positive and share what is missing to 1
        shift = (lam[[0, 1, 3]].sum() - 1) / 3
        return torch.relu(lam - shift)

    agree(
        slope(lambda lam: ((fit(lam) - target) ** 2).sum(), lam),
        problem,
        lam,
        dynamics=as_step_function(bl.Simplex().project),
        steps=60,
        methods=(*STEPS, bl.Implicit(condition="fixed-point")),
        tolerance=1e-9,
    )


def mirror_descent(loss, w, state, t):
    moved = w * torch.exp(-0.8 * bl.gradient(loss, w))
    return moved / moved.sum(), state


def test_mirror_descent_on_the_simplex():
    lam, target = torch.tensor([0.5, 0.3, 0.1]), torch.tensor([0.1, 0.2, 0.3])
    problem = bl.Problem(
        lambda w, lam, data: 2 * ((w - lam) ** 2).sum(),
        lambda w, lam, data: ((w - target) ** 2).sum(),
        lambda lam: torch.full((3,), 1 / 3),
    )
    fit = lambda lam: lam - (lam.sum() - 1) / 3  # noqa: E731
    agree(
        slope(lambda lam: ((fit(lam) - target) ** 2).sum(), lam),
        problem,
        lam,
        dynamics=mirror_descent,
        steps=300,
        methods=(*STEPS, bl.Implicit(condition="fixed-point")),
    )


def test_the_softmax_as_a_problem_on_the_simplex():
    """argmin over the simplex of Σ w log w − λᵀw is softmax(λ)."""
    lam, target = torch.tensor([0.5, -0.3, 1.1]), torch.tensor([0.1, 0.2, 0.3])
    problem = bl.Problem(
        lambda w, lam, data: (w * w.log() - lam * w).sum(),
        lambda w, lam, data: ((w - target) ** 2).sum(),
        lambda lam: torch.full((3,), 1 / 3),
    )
    agree(
        slope(lambda lam: ((lam.softmax(0) - target) ** 2).sum(), lam),
        problem,
        lam,
        dynamics=mirror_descent,
        steps=40,
        methods=(*STEPS, bl.Implicit(condition="fixed-point")),
        tolerance=1e-9,
    )


def test_portfolio_with_learned_returns_and_risk_aversion():
    generator = torch.Generator().manual_seed(9)
    days, next_days = torch.randn(30, 5, generator=generator), torch.randn(30, 5, generator=generator)
    risk = days.T @ days / 30
    lam = {"returns": torch.tensor([0.3, 0.1, -0.2, 0.2, -0.4]), "aversion": torch.tensor(0.2)}
    judge = lambda w: ((next_days @ w) ** 2).mean() - (next_days @ w).mean()  # noqa: E731
    simplex = bl.Simplex().project

    def fit(lam):
        q = lam["aversion"].exp() * risk
        return quadratic_program(q, lam["returns"], simplex, a=torch.ones(1, 5), b=torch.ones(1))

    assert 0 < int((fit(lam) == 0).sum()) < 4
    problem = bl.Problem(
        lambda w, lam, data: 0.5 * lam["aversion"].exp() * w @ risk @ w - lam["returns"] @ w,
        lambda w, lam, data: judge(w),
        lambda lam: torch.full((5,), 0.2),
    )
    agree(
        slope(lambda lam: judge(fit(lam)), lam),
        problem,
        lam,
        dynamics=as_penalty(simplex),
        steps=250,
        methods=LIMIT,
    )


def test_quadratic_program_with_equalities_and_every_coefficient_learned():
    generator = torch.Generator().manual_seed(10)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    root = draw(4, 4) / 2
    lam = {"Q": root @ root.T + 0.5 * torch.eye(4), "c": draw(4), "A": draw(2, 4), "b": draw(2)}

    def judge(w):
        return torch.sin(w).sum() + (w**2).sum()

    def fit(lam):
        a = lam["A"]
        matrix = torch.cat([torch.cat([lam["Q"], a.T], 1), torch.cat([a, torch.zeros(2, 2)], 1)])
        return torch.linalg.solve(matrix, torch.cat([-lam["c"], lam["b"]]))[:4]

    def plane(lam):
        return lambda w: w - lam["A"].T @ torch.linalg.solve(lam["A"] @ lam["A"].T, lam["A"] @ w - lam["b"])

    problem = bl.Problem(
        lambda w, lam, data: 0.5 * w @ lam["Q"] @ w + lam["c"] @ w, lambda w, lam, data: judge(w), zeros(4)
    )
    expected = slope(lambda lam: judge(fit(lam)), lam)
    # ∂f/∂Q is only defined along symmetric matrices: Newton's equations read Q, the descent (Q + Qᵀ)/2.
    expected.grad["Q"].copy_((expected.grad["Q"] + expected.grad["Q"].T) / 2)
    agree(
        expected,
        problem,
        lam,
        dynamics=lambda lam: bl.ISTA(descent_rate(lam["Q"].detach()), Within(plane(lam))),
        steps=300,
        methods=LIMIT,
    )


def test_quadratic_program_with_inequalities_through_its_dual():
    """min ½wᵀw·d + cᵀw with Gw ≤ h: multipliers m ≥ 0, w = −(c + Gᵀm)/d."""
    generator = torch.Generator().manual_seed(11)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    g, target = draw(3, 4), draw(4)
    lam = {"c": draw(4), "h": torch.tensor([-0.5, 2.0, -0.2]), "d": torch.tensor(1.5)}
    primal = lambda m, lam: -(lam["c"] + g.T @ m) / lam["d"]  # noqa: E731
    judge = lambda w: ((w - target) ** 2).sum()  # noqa: E731
    relu = bl.NonNegative().project

    def fit(lam):
        met = quadratic_program(g @ g.T / lam["d"], -(g @ lam["c"] / lam["d"] + lam["h"]), relu) > 0
        side, count = g[met], int(met.sum())
        assert 0 < count < 3
        matrix = torch.cat(
            [torch.cat([lam["d"] * torch.eye(4), side.T], 1), torch.cat([side, torch.zeros(count, count)], 1)]
        )
        return torch.linalg.solve(matrix, torch.cat([-lam["c"], lam["h"][met]]))[:4]

    problem = bl.Problem(
        lambda m, lam, data: 0.5 * lam["d"] * (primal(m, lam) ** 2).sum() + lam["h"] @ m,
        lambda m, lam, data: judge(primal(m, lam)),
        zeros(3),
    )
    agree(
        slope(lambda lam: judge(fit(lam)), lam),
        problem,
        lam,
        dynamics=bl.ISTA(descent_rate(g @ g.T / 1.5), Within(relu)),
        steps=400,
        methods=LIMIT,
    )


@pytest.mark.parametrize(
    "constraint", [bl.Box(-0.2, 0.3), bl.NonNegative(), bl.Simplex(), bl.Ball(0.5)], ids=lambda c: type(c).__name__
)
def test_a_constraint_of_the_library_in_a_step_of_the_users(constraint):
    lam = torch.tensor([-1.0, 0.3, 0.5, -0.2, 0.8])

    def penalised(w, lam, data):
        return squares(w, lam, data) + 0.5 * (lam.exp() * (w - lam) ** 2).mean()

    def plain(lam):
        w = torch.full((5,), 0.2)
        for _ in range(8):
            w = constraint.project(w - 0.4 * slope(lambda w: penalised(w, lam, NONNEGATIVE.train), w).grad)
        return squares(w, None, NONNEGATIVE.val)

    agree(
        differences(plain, lam),
        bl.Problem(penalised, squares, lambda lam: torch.full((5,), 0.2)),
        lam,
        NONNEGATIVE,
        dynamics=as_step_function(constraint.project),
        steps=8,
        methods=STEPS,
    )
