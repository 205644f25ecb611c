"""Theorem 3.2 and Remark 3.3: the bounds hold, and they are not vacuous."""

import itertools
import math

import pytest
import torch

import bilevel as bl
from bilevel import trees
from bilevel.engine.curvature import hessian
from bilevel.engine.process import Process
from bilevel.methods.implicit.error_bound import error_bound
from bilevel.testing import relative_error
from bilevel.testing.problems import examples
from quadratic_solution import closed_form


def ridge(seed, n=40, d=12):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    problem = bl.Problem(
        inner=lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).sum() + (lam.exp() * w**2).sum(),
        outer=lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean(),
        init=lambda lam: torch.zeros(d),
    )
    task = bl.Task((draw(n, d), draw(n)), (draw(n, d), draw(n)))

    def minimiser(lam):
        x, y = task.train
        return torch.linalg.solve(x.T @ x + torch.diag(lam.exp().expand(d)), x.T @ y)

    return problem, task, minimiser


@pytest.mark.parametrize(
    "dynamics",
    [bl.GradientDescent(0.004), bl.HeavyBall(0.004, 0.8), bl.Nesterov(0.004, 0.5), bl.Adam(0.05)],
    ids=lambda d: type(d).__name__,
)
@pytest.mark.parametrize("seed", range(2))
def test_bounds_hold_and_are_tight_on_quadratics(seed, dynamics):
    problem, task, minimiser = ridge(seed)
    lam = torch.full((12,), 0.5)
    limit = minimiser(lam)
    for steps in (0, 3, 30, 300):
        certificate = bl.certify(problem, lam, task, dynamics=dynamics, steps=steps)
        w = bl.hypergradient(problem, lam, task, dynamics=dynamics, steps=steps, allow_unused=True).inner
        distance = float((w - limit).norm())
        gap = abs(float(problem.outer(w, lam, task.val) - problem.outer(limit, lam, task.val)))
        assert certificate.applies and certificate.outcome.ok
        assert distance <= certificate.inner_distance * (1 + 1e-9) and gap <= certificate.value_gap * (1 + 1e-9)
        if distance > 1e-9:
            assert certificate.inner_distance <= 10 * distance
        if gap > 1e-9:
            assert certificate.value_gap <= 10 * gap


def test_curvature_is_that_of_the_hessian():
    problem, task, _ = ridge(0)
    lam = torch.full((12,), 0.5)
    x = task.train[0]
    eigenvalues = torch.linalg.eigvalsh(2 * x.T @ x + 2 * torch.diag(lam.exp()))
    certificate = bl.certify(problem, lam, task, dynamics=bl.GradientDescent(0.004), steps=5)
    assert certificate.mu == pytest.approx(float(eigenvalues[0]), rel=1e-9) and certificate.nu == pytest.approx(
        float(eigenvalues[-1]), rel=1e-9
    )
    assert certificate.step_limit == pytest.approx(2 / float(eigenvalues[-1])) and certificate.step_ok
    assert certificate.rate == pytest.approx(max(abs(1 - 0.004 * float(e)) for e in (eigenvalues[0], eigenvalues[-1])))
    assert certificate.best_rate == pytest.approx(
        float((eigenvalues[-1] - eigenvalues[0]) / (eigenvalues[-1] + eigenvalues[0]))
    )


@pytest.mark.parametrize(
    "dynamics", [bl.GradientDescent(0.004), bl.HeavyBall(0.004, 0.8), bl.HeavyBall(0.004, 0.2)], ids=str
)
def test_the_rate_is_the_one_observed(dynamics):
    problem, task, minimiser = ridge(1)
    lam = torch.full((12,), 0.5)
    distances = [
        float((bl.hypergradient(problem, lam, task, dynamics=dynamics, steps=T).inner - minimiser(lam)).norm())
        for T in (60, 140)
    ]
    observed = (distances[1] / distances[0]) ** (1 / 80)
    assert bl.certify(problem, lam, task, dynamics=dynamics, steps=5).rate == pytest.approx(observed, abs=0.01)


@pytest.mark.parametrize("gap", [1e-1, 1e-3, 1e-6])
def test_smallest_steps(gap):
    problem, task, minimiser = ridge(2)
    lam = torch.full((12,), 0.5)
    dynamics = bl.GradientDescent(0.004)
    T = bl.certify(problem, lam, task, dynamics=dynamics, steps=5).smallest_steps(gap)
    exact = float(problem.outer(minimiser(lam), lam, task.val))
    (x, y), w, true = task.train, torch.zeros(12), []
    for _ in range(T + 1):
        true.append(abs(float(problem.outer(w, lam, task.val)) - exact))
        w = w - 0.004 * 2 * (x.T @ (x @ w - y) + lam.exp() * w)
    reached = bl.hypergradient(problem, lam, task, dynamics=dynamics, steps=T, allow_unused=True).value
    assert abs(float(reached) - exact) == pytest.approx(true[T], rel=1e-6)
    assert true[T] <= gap and all(error > 0.99 * gap for error in true[:T])
    at = [bl.certify(problem, lam, task, dynamics=dynamics, steps=t).value_gap for t in (T - 1, T)]
    assert at[1] <= gap < at[0]


def test_a_gap_out_of_reach_is_an_error():
    problem, task, _ = ridge(2)
    certificate = bl.certify(problem, torch.zeros(12), task, dynamics=bl.GradientDescent(1e-5), steps=5)
    with pytest.raises(bl.BilevelError, match="limit"):
        certificate.smallest_steps(1e-8, limit=10)
    with pytest.raises(bl.BilevelError, match="gap > 0"):
        certificate.smallest_steps(0)


def test_without_strong_convexity_it_says_so():
    problem = bl.Problem(
        lambda w, lam, _: (w[0] - lam) ** 2, lambda w, lam, _: (w**2).sum(), lambda lam: torch.zeros(2)
    )
    certificate = bl.certify(problem, torch.tensor(1.0), bl.Task(None, None), dynamics=bl.GradientDescent(0.3), steps=5)
    assert (
        not certificate.applies
        and math.isinf(certificate.value_gap)
        and "not positive" in certificate.outcome
        and not certificate.outcome.ok
    )
    with pytest.raises(bl.BilevelError, match="not positive"):
        certificate.smallest_steps(1e-3)
    assert "∞" in str(certificate) or "inf" in str(certificate)


def test_a_smooth_problem_that_is_not_quadratic():
    """Logistic regression with an L2 term, whose strength is a modulus of strong convexity that the user knows."""
    torch.manual_seed(5)
    x, y = torch.randn(30, 4), (torch.rand(30) > 0.5).double()
    loss = torch.nn.functional.binary_cross_entropy_with_logits
    problem = bl.Problem(
        lambda w, lam, b: loss(b[0] @ w, b[1]) + 0.5 * lam.exp() * (w**2).sum(),
        lambda w, lam, b: loss(b[0] @ w, b[1]),
        lambda lam: torch.zeros(4),
    )
    lam, task = torch.tensor(-2.0), bl.Task((x, y), (x.flip(0), y))
    limit = bl.hypergradient(problem, lam, task, dynamics=bl.GradientDescent(0.5), steps=600)
    for steps in (1, 10, 50):
        certificate = bl.certify(
            problem, lam, task, dynamics=bl.GradientDescent(0.5), steps=steps, mu=math.exp(-2.0), method=bl.Reverse()
        )
        here = bl.hypergradient(problem, lam, task, dynamics=bl.GradientDescent(0.5), steps=steps)
        distance, gap = float((here.inner - limit.inner).norm()), abs(float(here.value - limit.value))
        assert distance <= certificate.inner_distance <= 10 * distance and gap <= certificate.value_gap <= 10 * gap
        assert certificate.hypergradient_error == pytest.approx(abs(float(here.grad - limit.grad)), rel=1e-4, abs=1e-9)
        assert "given" in certificate.outcome


@pytest.mark.parametrize(
    "dynamics",
    [
        bl.FISTA(0.004, bl.L1(3.0)),
        bl.Projected(bl.GradientDescent(0.004), bl.Ball(0.5)),
        bl.Projected(bl.HeavyBall(0.004, 0.5), bl.Ball(0.5)),
        bl.Until(bl.ISTA(0.004, bl.L1(3.0)), tol=1e-12),
    ],
    ids=str,
)
def test_proximal_dynamics(dynamics):
    problem, task, _ = ridge(3)
    smooth = bl.Problem(problem.inner, problem.outer, problem.init)
    lam = torch.full((12,), 0.5)
    limit = bl.hypergradient(smooth, lam, task, dynamics=dynamics, steps=500)
    for steps in (5, 20):
        certificate = bl.certify(smooth, lam, task, dynamics=dynamics, steps=steps)
        here = bl.hypergradient(smooth, lam, task, dynamics=dynamics, steps=steps)
        distance = float((here.inner - limit.inner).norm())
        assert distance <= certificate.inner_distance * (1 + 1e-9) <= 10 * distance
        assert abs(float(here.value - limit.value)) <= certificate.value_gap


def test_a_list_of_tasks_reports_the_worst():
    problem, task, _ = ridge(0)
    other = ridge(1)[1]
    settings = {"dynamics": bl.GradientDescent(0.004), "steps": 20}
    both = bl.certify(problem, torch.zeros(12), [task, other], **settings)
    singles = [bl.certify(problem, torch.zeros(12), one, **settings) for one in (task, other)]
    assert both.inner_distance == max(s.inner_distance for s in singles) and both.mu == min(s.mu for s in singles)
    assert both.value_gap == pytest.approx(sum(s.value_gap for s in singles) / 2)
    assert both.smallest_steps(1e-3) == max(s.smallest_steps(1e-3) for s in singles)


def test_minibatches_have_no_single_objective_to_certify():
    example = examples()[2]
    with pytest.raises(bl.BilevelError, match="function of t"):
        bl.certify(example.problem, example.lam, example.task, dynamics=bl.GradientDescent(0.1), steps=3)


class TestTheorem32:
    """f_T → f uniformly on Λ, and so do the minimisers, on a problem whose f is known."""

    GRID = torch.linspace(-4, 4, 81)

    def curves(self, T):
        problem, task, minimiser = ridge(0, n=20)
        dynamics = bl.GradientDescent(0.004)
        f_T = torch.stack(
            [
                bl.hypergradient(problem, lam, task, dynamics=dynamics, steps=T, method=bl.Spectral()).value
                for lam in self.GRID
            ]
        )
        f = torch.stack([problem.outer(minimiser(lam), lam, task.val) for lam in self.GRID])
        return f_T, f

    def test_uniform_convergence_and_minimisers(self):
        gaps, shifts, minima = [], [], []
        for T in (10, 100, 1000, 10_000):
            f_T, f = self.curves(T)
            gaps.append(float((f_T - f).abs().max()))
            shifts.append(abs(float(self.GRID[f_T.argmin()] - self.GRID[f.argmin()])))
            minima.append(abs(float(f_T.min() - f.min())))
        assert all(later < earlier for earlier, later in itertools.pairwise(gaps)) and gaps[-1] < 1e-10
        assert shifts[-1] == 0 and shifts[0] > 0
        assert minima[-1] < 1e-10 < minima[0]


def test_the_closed_form_of_the_battery_is_the_limit():
    example = examples()[0]
    limit = bl.hypergradient(example.problem, example.lam, example.task, dynamics=bl.HeavyBall(0.3, 0.5), steps=400)
    w, grad = closed_form(example)
    assert relative_error(limit.inner, w) < 1e-10 and relative_error(limit.grad, grad) < 1e-8


@pytest.mark.parametrize("encoded", [False, True])
def test_the_bound_on_a_hypergradient_holds_away_from_the_minimiser(encoded):
    """At a u that is `radius` away from w_λ, with a v that does not solve the linear system, for any vector."""
    _, task, _ = ridge(0)
    lam, dynamics = torch.linspace(-1, 1, 12), bl.GradientDescent(0.05)

    def shrunk(lam, task):
        return bl.Task((task.train[0] * lam.exp(), task.train[1]), (task.val[0] * lam.exp(), task.val[1]))

    problem = bl.Problem(
        inner=lambda w, lam, b: (b[0] @ w - b[1]).cosh().log().mean() + (lam.exp() * w**2).sum(),
        outer=lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean() + (w**4).sum(),
        init=lambda lam: torch.zeros(12),
        encode=shrunk if encoded else None,
    )
    method, settings = bl.Implicit(bl.Direct(), newton=1e-12), {"dynamics": dynamics, "allow_unused": True}
    exact = bl.hypergradient(problem, lam, task, steps=1, method=method, **settings)
    process = Process(problem, lam, task, dynamics, 0, start=exact.inner, allow_unused=True)
    slope, operator = hessian(process.bound.loss(1), exact.inner)
    mu = float(torch.linalg.eigvalsh(operator.rows(torch.eye(len(slope)))).min())
    generator, ratios = torch.Generator().manual_seed(0), []
    for radius, wrong in ((1e-3, 0.0), (1e-4, 0.1), (0.0, 0.3), (0.0, 0.0)):
        away = trees.map(lambda leaf: torch.randn(leaf.shape, generator=generator), exact.inner)
        away = trees.scale(away, radius / float(trees.norm(away)))
        u, v = trees.add(exact.inner, away), -exact.adjoint * (1 + wrong)
        guess = trees.map(lambda leaf, size=wrong: leaf + size * torch.ones(leaf.shape), exact.grad)
        error = float(trees.norm(trees.subtract(guess, exact.grad)))
        ratios.append((error_bound(process, u, radius, mu, guess, v), error))
    assert mu > 0 and all(error <= bound for bound, error in ratios)
    # v is 30 % off and the vector far away: the bound is not much more than their sum.
    assert ratios[2][0] < 20 * ratios[2][1] and ratios[3][0] < 1e-9


@pytest.mark.parametrize("as_result", [False, True])
def test_starts_of_several_tasks(as_result):
    problem, one, _ = ridge(0)
    _, two, _ = ridge(1)
    lam, run = torch.full((12,), 0.5), {"dynamics": bl.HeavyBall(0.004, 0.8), "steps": 5}
    starts = [torch.ones(12), -torch.ones(12)]
    if as_result:
        starts = bl.hypergradient(problem, lam, [one, two], **run)
    given = {**run, "method": bl.Reverse()}
    certificate = bl.certify(problem, lam, [one, two], start=starts, **given)
    expected = bl.hypergradient(problem, lam, [one, two], start=starts, **given)
    assert certificate.value == pytest.approx(float(expected.value), rel=1e-12)
    each = zip([one, two], starts.tasks if as_result else starts, strict=True)
    apart = [bl.certify(problem, lam, task, start=start, **given) for task, start in each]
    assert certificate.hypergradient_error == max(c.hypergradient_error for c in apart)
    assert certificate.hypergradient_error > 0
    with pytest.raises(bl.BilevelError, match="start must be a list with one entry for each of the 2 tasks"):
        bl.certify(problem, lam, [one, two], start=torch.ones(12), **run)


def test_steps_are_not_counted_from_an_earlier_result():
    problem, task, _ = ridge(0)
    lam, run = torch.full((12,), 0.5), {"dynamics": bl.Adam(0.1), "steps": 5}
    certificate = bl.certify(problem, lam, task, start=bl.hypergradient(problem, lam, task, **run), **run)
    with pytest.raises(bl.BilevelError, match="begins at a w"):
        certificate.smallest_steps(1e-4)


def test_no_bound_on_a_hypergradient_at_a_kink():
    """Gradient descent circles around the kink of |w|, where Newton's method does not reach ∇L = 0."""
    x = torch.tensor([0.1, 3.0, -0.2])
    problem = bl.Problem(
        inner=lambda w, lam, x: 0.5 * ((w - x) ** 2).sum() + (lam.exp() * w.abs()).sum(),
        outer=lambda w, lam, x: ((w - 1) ** 2).sum(),
        init=lambda lam: torch.full((3,), 0.33),
    )
    run = {"dynamics": bl.GradientDescent(0.1), "steps": 1000, "method": bl.Implicit()}
    certificate = bl.certify(problem, torch.zeros(3), bl.Task(x, torch.zeros(1)), **run)
    assert math.isinf(certificate.hypergradient_error) and math.isinf(certificate.hypergradient_bound)
    assert "no bound on the hypergradient" in certificate.outcome.lower()


def test_a_first_certificate_of_a_problem_with_weight_norm():
    """torch's second derivative of weight norm is wrong, and replaced from the checks of the first call on."""
    torch.manual_seed(0)
    w, apply = bl.functional(torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 1)))
    x = torch.randn(6, 3)
    problem = bl.Problem(
        lambda w, lam, b: (apply(w, x) - 1).pow(2).mean() + lam.exp() * sum((v**2).sum() for v in w.values()),
        lambda w, lam, b: (apply(w, x) - 2).pow(2).mean(),
        lambda lam: w,
    )
    call = {"dynamics": bl.GradientDescent(0.02), "steps": 60}
    first, second = (bl.certify(problem, torch.tensor(-1.0), bl.Task(None, None), **call) for _ in range(2))
    assert (first.mu, first.nu, first.value_gap) == (second.mu, second.nu, second.value_gap)


def test_a_weight_decay_that_torch_adds_to_the_gradient():
    """The limit of the run minimises L with the decay, and so does Implicit's: the certificate is about that point."""
    problem, task, _ = ridge(3)
    decayed = bl.Problem(lambda w, lam, b: problem.inner(w, lam, b) + (w**2).sum(), problem.outer, problem.init)
    lam, steps = torch.zeros(12), 200
    run = bl.TorchOptim(torch.optim.SGD, lr=0.005, weight_decay=2.0)
    found = bl.certify(problem, lam, task, dynamics=run, steps=steps, method=bl.Implicit())
    same = bl.certify(decayed, lam, task, dynamics=bl.GradientDescent(0.005), steps=steps, method=bl.Implicit())
    for name in ("mu", "nu", "value", "gradient_norm", "inner_distance", "value_gap", "hypergradient_bound"):
        assert getattr(found, name) == pytest.approx(getattr(same, name), rel=1e-6, abs=1e-9), name
    assert found.value_gap < 1e-6 and found.hypergradient_error < 1e-6
