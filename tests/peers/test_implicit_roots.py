"""Smooth minimisers, roots of equations and fixed points, differentiated where they lie.

The references are closed forms and Newton's method in plain torch with the implicit function theorem in its last step.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from comparing import agree, classification, minimiser, regression, slope, squares, zeros
from torch.nn.functional import cross_entropy, softplus

import bilevel as bl

TASK = regression(20, 4)
SOLVERS = {
    "conjugate gradients": bl.Implicit(bl.CG(tol=1e-13)),
    "direct": bl.Implicit(bl.Direct()),
    "Neumann series": bl.Implicit(bl.Neumann(terms=3000)),
    "fixed-point iteration": bl.Implicit(bl.FixedPoint(tol=1e-12, max_iter=100_000)),
    "Nystrom": bl.Implicit(bl.Nystrom(rank=100)),
    "Newton": bl.Implicit(bl.CG(tol=1e-13), newton=1e-12),
    "fixed point of the steps": bl.Implicit(bl.Direct(), condition="fixed-point"),
}
ALL = (bl.Unrolled(), bl.Reverse(), bl.Reverse("sqrt", group_bytes=0), bl.Forward(), *SOLVERS.values())


def ridge(w, lam, data):
    return squares(w, lam, data) + 0.5 * (lam.exp() * w**2).sum()


@pytest.mark.parametrize("solver", SOLVERS)
def test_ridge_by_every_linear_solver(solver):
    x, y = TASK.train
    lam = torch.tensor([-2.0, -1.0, 0.0, 1.0])
    fit = lambda lam: torch.linalg.solve(x.T @ x / 20 + torch.diag(lam.exp()), x.T @ y / 20)  # noqa: E731
    agree(
        slope(lambda lam: squares(fit(lam), lam, TASK.val), lam),
        bl.Problem(ridge, squares, zeros(4)),
        lam,
        TASK,
        dynamics=bl.GradientDescent(0.3),
        steps=400,
        methods=[SOLVERS[solver]],
        tolerance=1e-9,
    )


def test_ridge_with_the_table_the_targets_and_the_penalty_in_lam():
    lam = {"x": TASK.train[0], "y": TASK.train[1], "penalty": torch.tensor(-1.0)}
    problem = bl.Problem(
        lambda w, lam, data: squares(w, lam, (lam["x"], lam["y"])) + 0.5 * lam["penalty"].exp() * (w**2).sum(),
        squares,
        zeros(4),
    )

    def fit(lam):
        h = lam["x"].T @ lam["x"] / 20 + lam["penalty"].exp() * torch.eye(4)
        return torch.linalg.solve(h, lam["x"].T @ lam["y"] / 20)

    agree(
        slope(lambda lam: squares(fit(lam), None, TASK.val), lam),
        problem,
        lam,
        bl.Task(None, TASK.val),
        dynamics=bl.GradientDescent(0.4),
        steps=300,
        methods=[bl.Unrolled(), bl.Reverse(), bl.Spectral(), "auto", bl.Implicit(bl.Direct()), bl.Implicit()],
        tolerance=1e-8,
    )


def test_kernel_ridge_with_a_learned_width_and_penalty():
    (x, y), (z, truth) = TASK.train, TASK.val
    lam = {"width": torch.tensor(0.5), "penalty": torch.tensor(-0.5)}
    gram = lambda a, b, lam: torch.exp(-(torch.cdist(a, b) ** 2) / (2 * lam["width"].exp() ** 2))  # noqa: E731
    judge = lambda a, lam: ((gram(z, x, lam) @ a - truth) ** 2).mean()  # noqa: E731
    problem = bl.Problem(
        lambda a, lam, data: 0.5 * a @ gram(x, x, lam) @ a + 0.5 * lam["penalty"].exp() * (a @ a) - y @ a,
        lambda a, lam, data: judge(a, lam),
        zeros(20),
    )
    fit = lambda lam: torch.linalg.solve(gram(x, x, lam) + lam["penalty"].exp() * torch.eye(20), y)  # noqa: E731
    agree(
        slope(lambda lam: judge(fit(lam), lam), lam),
        problem,
        lam,
        dynamics=bl.GradientDescent(0.15),
        steps=500,
        methods=[bl.Reverse(), bl.Spectral(), bl.Implicit(bl.CG(tol=1e-13))],
    )


def logistic(w, lam, data):
    return softplus(-(2 * data[1] - 1) * (data[0] @ w)).mean() + 0.5 * lam.exp() * (w**2).sum()


def multinomial(w, lam, data):
    return cross_entropy(data[0] @ w, data[1]) + 0.5 * lam.exp() * (w**2).sum()


def poisson(w, lam, data):
    rate = data[0] @ w
    return (rate.exp() - data[1].abs().round() * rate).mean() + 0.5 * lam.exp() * (w**2).sum()


def pseudo_huber(w, lam, data):
    return ((data[0] @ w - data[1]).square() + 0.1).sqrt().mean() + 0.5 * lam.exp() * (w**2).sum()


def expectile(w, lam, data):
    error = data[1] - data[0] @ w
    return (0.3 * softplus(error) ** 2 + 0.7 * softplus(-error) ** 2).mean() + 0.5 * lam.exp() * (w**2).sum()


def log_cosh(w, lam, data):
    return torch.log(torch.cosh(data[0] @ w - data[1])).mean() + 0.5 * lam.exp() * (w**2).sum()


def smoothed_hinge(w, lam, data):
    return softplus(4 * (1 - (2 * data[1] - 1) * (data[0] @ w))).mean() / 4 + 0.5 * lam.exp() * (w**2).sum()


SMALL = regression(20, 4, seed=3)
SMOOTH = {
    "logistic regression": (logistic, classification(30, 4), (4,), 1.5),
    "multinomial logistic regression": (multinomial, classification(30, 4, 3), (4, 3), 1.5),
    "Poisson regression": (poisson, bl.Task((SMALL.train[0] / 2, SMALL.train[1]), SMALL.val), (4,), 0.5),
    "robust regression with a pseudo-Huber loss": (pseudo_huber, TASK, (4,), 0.3),
    "smooth expectile regression": (expectile, TASK, (4,), 0.3),
    "regression with a log-cosh loss": (log_cosh, TASK, (4,), 0.4),
    "classification with a smoothed hinge": (smoothed_hinge, classification(30, 4), (4,), 0.6),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_models_at_their_minimiser(name):
    loss, task, shape, lr = SMOOTH[name]
    lam = torch.tensor(-1.5)
    outer = lambda w, lam, data: loss(w, torch.tensor(-50.0), data)  # noqa: E731 - without the penalty
    fit = lambda lam: minimiser(lambda w, lam: loss(w, lam, task.train), torch.zeros(shape), lam)  # noqa: E731
    agree(
        slope(lambda lam: outer(fit(lam), lam, task.val), lam),
        bl.Problem(loss, outer, zeros(*shape)),
        lam,
        task,
        dynamics=bl.GradientDescent(lr),
        steps=300,
        methods=[bl.Reverse(), bl.Forward(), bl.Implicit(bl.CG(tol=1e-13)), SOLVERS["Newton"]],
    )


def test_a_curve_of_exponential_decay_fitted_by_newton():
    """Non-linear least squares, differentiated in the observations."""
    times = torch.linspace(0, 3, 12)
    curve = lambda w: w[0] * torch.exp(-w[1].exp() * times)  # noqa: E731
    seen = curve(torch.tensor([2.0, 0.1])) + 0.05 * torch.sin(7 * times)
    loss = lambda w, lam: 0.5 * ((curve(w) - lam) ** 2).sum()  # noqa: E731
    fit = lambda lam: minimiser(loss, torch.tensor([2.0, 0.0]), lam)  # noqa: E731
    problem = bl.Problem(
        lambda w, lam, data: loss(w, lam), lambda w, lam, data: w.square().sum(), lambda lam: torch.tensor([2.0, 0.0])
    )
    agree(
        slope(lambda lam: fit(lam).square().sum(), seen),
        problem,
        seen,
        dynamics=bl.GradientDescent(0.05),
        steps=1,
        methods=[SOLVERS["Newton"]],
        tolerance=1e-9,
    )


def test_the_real_root_of_a_cubic():
    """w³ + w = λ as the minimum of (w³ + w − λ)²/2; Cardano gives the root."""
    lam = torch.tensor(1.3)

    def cardano(lam):
        r = (lam**2 / 4 + 1 / 27).sqrt()
        return (lam / 2 + r) ** (1 / 3) - (r - lam / 2) ** (1 / 3)

    problem = bl.Problem(
        lambda w, lam, data: 0.5 * (w**3 + w - lam) ** 2, lambda w, lam, data: w.sin(), lambda lam: torch.tensor(0.5)
    )
    agree(
        slope(lambda lam: cardano(lam).sin(), lam),
        problem,
        lam,
        dynamics=bl.GradientDescent(0.05),
        steps=400,
        methods=[bl.Reverse(), bl.Forward(), bl.Implicit(), SOLVERS["Newton"]],
        tolerance=1e-9,
    )


def system(w, lam):
    """Two equations whose Jacobian is not symmetric."""
    return torch.stack([w[0] + 0.5 * w[1].tanh() - lam[0], w[1] - 0.4 * w[0].sin() - lam[1] ** 2])


def root_of_the_system(lam):
    w = torch.zeros(2)
    for _ in range(40):
        jacobian = torch.autograd.functional.jacobian(lambda w: system(w, lam.detach()), w)
        w = w.detach() - torch.linalg.solve(jacobian, system(w.detach(), lam))
    return w


def test_a_system_of_equations_as_least_squares():
    lam = torch.tensor([0.7, 0.9])
    problem = bl.Problem(
        lambda w, lam, data: 0.5 * system(w, lam).square().sum(), lambda w, lam, data: (w**3).sum(), zeros(2)
    )
    agree(
        slope(lambda lam: (root_of_the_system(lam) ** 3).sum(), lam),
        problem,
        lam,
        dynamics=bl.GradientDescent(0.5),
        steps=200,
        methods=[bl.Reverse(), bl.Forward(), bl.Implicit(), SOLVERS["Newton"]],
        tolerance=1e-9,
    )


def newton_root(loss, w, state, t):
    return w - (w**2 - state) / (2 * w), state


def test_the_square_root_by_newtons_iteration():
    """Five steps of w ← (w + λ/w)/2, with λ carried in the state."""
    lam = torch.tensor(2.0)
    problem = bl.Problem(lambda w, lam, data: (w**2 - lam) ** 2, lambda w, lam, data: w**3, lambda lam: lam * 1.0)
    dynamics = lambda lam: bl.StepFunction(newton_root, lambda w: lam.expand(()) * 1.0)  # noqa: E731
    agree(
        slope(lambda lam: lam**1.5, lam),
        problem,
        lam,
        dynamics=dynamics,
        steps=6,
        tolerance=1e-9,
    )


@pytest.mark.parametrize("method", ["Unrolled", "Reverse", "Forward"])
def test_keplers_equation_by_its_fixed_point(method):
    """E = m + e·sin E, with both the mean anomaly and the eccentricity in λ."""
    lam = {"mean": torch.tensor(1.1), "eccentricity": torch.tensor(0.4)}

    def anomaly(lam):
        m, e = lam["mean"], lam["eccentricity"]
        w = 1.0
        for _ in range(50):
            w = w - (w - e.item() * math.sin(w) - m.item()) / (1 - e.item() * math.cos(w))
        return w - (w - e * math.sin(w) - m) / (1 - e * math.cos(w)).detach()

    problem = bl.Problem(lambda w, lam, data: w**2, lambda w, lam, data: w.cos(), zeros())
    agree(
        slope(lambda lam: anomaly(lam).cos(), lam),
        problem,
        lam,
        dynamics=lambda lam: bl.StepFunction(
            lambda loss, w, state, t: (lam["mean"] + lam["eccentricity"] * w.sin(), state)
        ),
        steps=60,
        methods=[getattr(bl, method)()],
        tolerance=1e-9,
    )


def test_pagerank_with_a_learned_damping():
    """w = d·P w + (1 − d)/n, a linear fixed point."""
    links = torch.rand(5, 5, generator=torch.Generator().manual_seed(1))
    p, target, lam = links / links.sum(0), torch.linspace(0, 1, 5), torch.tensor(0.8)
    rank = lambda lam: torch.linalg.solve(torch.eye(5) - lam * p, (1 - lam) / 5 * torch.ones(5))  # noqa: E731
    problem = bl.Problem(
        lambda w, lam, data: (w**2).sum(), lambda w, lam, data: target @ w, lambda lam: torch.ones(5) / 5
    )
    agree(
        slope(lambda lam: target @ rank(lam), lam),
        problem,
        lam,
        dynamics=lambda lam: bl.StepFunction(lambda loss, w, state, t: (lam * p @ w + (1 - lam) / 5, state)),
        steps=200,
        tolerance=1e-9,
    )


def test_optimal_transport_by_sinkhorns_iteration():
    """The scalings of a 3 × 4 kernel whose costs are learned; the reference runs the same iteration in plain torch."""
    lam = torch.rand(3, 4, generator=torch.Generator().manual_seed(2))
    a, b = torch.full((3,), 1 / 3), torch.full((4,), 1 / 4)

    def iterate(v, lam):
        k = torch.exp(-lam / 0.5)
        return b / (k.T @ (a / (k @ v)))

    def cost(v, lam):
        k = torch.exp(-lam / 0.5)
        return ((a / (k @ v))[:, None] * k * v * lam).sum()

    def plain(lam):
        v = torch.ones(4)
        for _ in range(30):
            v = iterate(v, lam)
        return cost(v, lam)

    problem = bl.Problem(
        lambda w, lam, data: (w**2).sum(), lambda w, lam, data: cost(w, lam), lambda lam: torch.ones(4)
    )
    agree(
        slope(plain, lam),
        problem,
        lam,
        dynamics=lambda lam: bl.StepFunction(lambda loss, w, state, t: (iterate(w, lam), state)),
        steps=30,
        tolerance=1e-10,
    )


WEIGHTS = 0.4 * torch.randn(4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
INPUT = torch.randn(4, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def equilibrium(lam):
    """The fixed point of z = tanh(Wz + x), by iteration, then one Newton step that carries the derivative."""
    z = torch.zeros(4)
    for _ in range(300):
        z = torch.tanh(lam.detach() @ z + INPUT)
    matrix = torch.eye(4) - (1 - z**2)[:, None] * lam.detach()
    return z - torch.linalg.solve(matrix, z - torch.tanh(lam @ z + INPUT))


DEEP = bl.Problem(lambda w, lam, data: (w**2).sum(), lambda w, lam, data: (w**3).sum(), zeros(4))


def test_a_deep_equilibrium_layer_by_its_steps():
    agree(
        slope(lambda lam: (equilibrium(lam) ** 3).sum(), WEIGHTS),
        DEEP,
        WEIGHTS,
        dynamics=lambda lam: bl.StepFunction(lambda loss, w, state, t: (torch.tanh(lam @ w + INPUT), state)),
        steps=150,
        tolerance=1e-9,
    )


def test_a_deep_equilibrium_layer_as_a_dynamics_that_says_where_it_rests():
    @dataclass(frozen=True)
    class Layer(bl.Dynamics):
        weights: torch.Tensor

        def step(self, loss, w, state, t):
            return self.stationary_step(loss, w, t), state

        def stationary_step(self, loss, w, t):
            return torch.tanh(self.weights @ w + INPUT)

    agree(
        slope(lambda lam: (equilibrium(lam) ** 3).sum(), WEIGHTS),
        DEEP,
        WEIGHTS,
        dynamics=lambda lam: Layer(lam),
        steps=150,
        methods=[bl.Reverse(), bl.Implicit(), bl.Implicit(bl.Direct())],
        tolerance=1e-9,
    )
