"""Defects of earlier systems, each as a test of ours."""

import pytest
import torch

import bilevel as bl
from bilevel.hypergradients import value_of
from bilevel.testing import central_differences, relative_error


def ridge():
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    problem = bl.Problem(
        inner=lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).sum() + (lam.exp() * w**2).sum(),
        outer=lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean(),
        init=lambda lam: torch.zeros_like(lam),
    )
    return problem, draw(30) * 0.1, bl.Task((draw(30, 30), draw(30)), (draw(30, 30), draw(30)))


@pytest.mark.parametrize("method", [bl.Reverse(), bl.Reverse("sqrt"), bl.Forward(), bl.Truncated(99)], ids=str)
def test_farho_replays_batch_t_minus_1(method):
    """Minibatches: the backward pass must see the batch of the step that it undoes."""
    problem, lam, task = ridge()
    x, y = task.train
    minibatches = bl.Task(lambda t: (x[5 * (t - 1) : 5 * t], y[5 * (t - 1) : 5 * t]), task.val)
    settings = {"dynamics": bl.GradientDescent(0.01), "steps": 6}
    expected = central_differences(lambda lam: value_of(problem, lam, minibatches, **settings), lam)
    assert relative_error(bl.hypergradient(problem, lam, minibatches, method=method, **settings).grad, expected) < 1e-6
    shifted = bl.Task(lambda t: minibatches.train(max(t - 1, 1)), task.val)
    assert relative_error(bl.hypergradient(problem, lam, shifted, method=method, **settings).grad, expected) > 1e-2


@pytest.mark.parametrize(
    "dynamics",
    [bl.Adam(0.1), bl.AdamW(0.1), bl.RMSProp(0.1), bl.TorchOptim(torch.optim.Adam, lr=0.1)],
    ids=lambda d: type(d).__name__,
)
def test_adaptive_dynamics_are_differentiable_where_the_gradient_is_zero(dynamics):
    """FAR-HO issue 13 and TorchOpt's non-finite meta-gradients: a ReLU network with dead units and batch norm, in
    float32."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, padding=1, bias=False),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(4 * 36, 3),
    )
    w, apply = bl.functional(network)
    w["4.weight"][:, :36] = 0
    w["1.bias"] -= 1.0
    images, labels = torch.randn(8, 1, 6, 6), torch.arange(8) % 3
    cross_entropy = torch.nn.functional.cross_entropy
    problem = bl.Problem(
        inner=lambda w, lam, b: cross_entropy(apply(w, b[0]), b[1]) + lam.exp() * sum((v**2).sum() for v in w.values()),
        outer=lambda w, lam, b: cross_entropy(apply(w, b[0]), b[1]),
        init=lambda lam: w,
    )
    result = bl.hypergradient(
        problem, torch.tensor(-8.0), bl.Task((images, labels), (images.flip(0), labels)), dynamics=dynamics, steps=5
    )
    assert bool(torch.isfinite(result.grad)) and float(result.grad) != 0


def test_betty_cg_with_the_wrong_residual():
    matrix = torch.tensor([[4.0, 1.0, 0.5], [1.0, 3.0, 0.2], [0.5, 0.2, 2.0]])
    b = torch.tensor([1.0, 2.0, 3.0])
    for solver in (bl.CG(tol=1e-13), bl.CG(tol=1e-13, preconditioner=bl.Nystrom(rank=1, damping=1.0))):
        assert torch.allclose(solver.solve(lambda v: matrix @ v, b).x, torch.linalg.solve(matrix, b), rtol=1e-10)
    problem, lam, task = ridge()
    x, y = task.train

    def exact(lam):
        w = torch.linalg.solve(x.T @ x + torch.diag(lam.exp()), x.T @ y)
        return problem.outer(w, lam, task.val)

    expected = torch.func.grad(exact)(lam)
    found = bl.hypergradient(
        problem, lam, task, dynamics=bl.GradientDescent(0.004), steps=6000, method=bl.Implicit(bl.CG(tol=1e-12))
    )
    assert relative_error(found.grad, expected) < 1e-8


def test_boat_evaluates_truncated_steps_at_w0():
    """w has moved a long way when the window begins, and the curvature with it: derivatives at w₀ would be far off."""
    problem = bl.Problem(
        inner=lambda w, lam, b: torch.cosh(w - lam).sum(),
        outer=lambda w, lam, b: (w**3).sum(),
        init=lambda lam: torch.full_like(lam, 3.0),
    )
    lam = torch.tensor([0.5, -0.2])
    steps, k, lr = 12, 4, 0.05
    w = torch.full_like(lam, 3.0)
    for _ in range(steps - k):
        w = w - lr * torch.sinh(w - lam)
    live = lam.clone().requires_grad_()
    for _ in range(k):
        w = w - lr * torch.sinh(w - live)
    expected = torch.autograd.grad((w**3).sum(), live)[0]
    found = bl.hypergradient(
        problem, lam, bl.Task(None, None), dynamics=bl.GradientDescent(lr), steps=steps, method=bl.Truncated(k)
    ).grad
    assert relative_error(found, expected) < 1e-12


def test_higher_leaves_the_users_module_alone():
    network = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    before = {k: v.clone() for k, v in network.state_dict().items()}
    w, apply = bl.functional(network)
    problem = bl.Problem(
        inner=lambda w, lam, x: (apply(w, x) ** 2).mean() + lam * sum((v**2).sum() for v in w.values()),
        outer=lambda w, lam, x: (apply(w, x) ** 2).mean(),
        init=lambda lam: w,
    )
    bl.hypergradient(
        problem, torch.tensor(0.1), bl.Task(torch.randn(5, 3), torch.randn(5, 3)), dynamics=bl.HeavyBall(0.1), steps=4
    )
    assert all(torch.equal(before[k], v) for k, v in network.state_dict().items())
    assert all(p.grad is None for p in network.parameters())


def test_the_error_of_the_implicit_gradient_is_stated():
    """On a ridge with T = 50 the implicit gradient at w_T is far from ∇f_T and from ∇f; the certificate says how far
    from ∇f."""
    problem, lam, task = ridge()
    settings = {"dynamics": bl.GradientDescent(0.002), "steps": 50}
    x, y = task.train
    limit = torch.func.grad(
        lambda lam: problem.outer(torch.linalg.solve(x.T @ x + torch.diag(lam.exp()), x.T @ y), lam, task.val)
    )(lam)
    implicit = bl.hypergradient(problem, lam, task, method=bl.Implicit(), **settings)
    certificate = bl.certify(problem, lam, task, method=bl.Implicit(), **settings)
    true = relative_error(implicit.grad, limit)
    assert true > 0.05
    assert certificate.hypergradient_relative == pytest.approx(true, rel=1e-6)
    assert certificate.residual is not None and certificate.residual < 1e-8


def test_a_stateful_sampler_is_refused():
    problem, lam, task = ridge()
    x, y = task.train
    stream = iter(range(10_000))

    def train(t):
        i = next(stream) % 6
        return x[5 * i : 5 * i + 5], y[5 * i : 5 * i + 5]

    with pytest.raises(bl.BilevelError, match="not a pure function of t"):
        bl.hypergradient(problem, lam, bl.Task(train, task.val), dynamics=bl.GradientDescent(0.01), steps=6)


def test_a_learned_start_that_the_objective_uses_too():
    """When w₀ is λ itself, ∇_w L must not pick up ∂L/∂λ (a proximal term around the learned start)."""
    problem = bl.Problem(
        inner=lambda w, lam, x: ((w - x) ** 2).sum() + 3 * ((w - lam) ** 2).sum(),
        outer=lambda w, lam, x: ((w - x) ** 2).sum(),
        init=lambda lam: lam,
    )
    lam, task = torch.tensor([1.0, -2.0]), bl.Task(torch.tensor([0.3, 0.4]), torch.tensor([0.1, 0.9]))
    settings = {"dynamics": bl.GradientDescent(0.07), "steps": 5}
    expected = central_differences(lambda lam: value_of(problem, lam, task, **settings), lam)
    for method in (bl.Unrolled(), bl.Reverse(), bl.Forward(), bl.Spectral()):
        assert relative_error(bl.hypergradient(problem, lam, task, method=method, **settings).grad, expected) < 1e-8
