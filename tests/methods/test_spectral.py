"""Spectral: exact at any T, for repeated and zero eigenvalues, many columns, learned settings."""

import pytest
import torch

import bilevel as bl
from bilevel.hypergradients import value_of
from bilevel.testing import central_differences, relative_error


def quadratic(matrix_of, shape):
    generator = torch.Generator().manual_seed(2)
    b, target = torch.randn(*shape, generator=generator), torch.randn(*shape, generator=generator)
    problem = bl.Problem(
        inner=lambda w, lam, _: 0.5 * (w * (matrix_of(lam) @ w)).sum() - (b * w).sum(),
        outer=lambda w, lam, _: ((w - target) ** 2).sum(),
        init=lambda lam: torch.full(shape, 0.5),
    )
    return problem, bl.Task(None, None)


def agree(problem, lam, task, dynamics, steps, tolerance=1e-10):
    settings = {"dynamics": dynamics, "steps": steps}
    found = bl.hypergradient(problem, lam, task, method=bl.Spectral(), **settings)
    expected = bl.hypergradient(problem, lam, task, method=bl.Unrolled(), **settings)
    assert relative_error(found.inner, expected.inner) < tolerance
    assert relative_error(found.grad, expected.grad) < tolerance


@pytest.mark.parametrize("dynamics", [bl.GradientDescent(0.3), bl.HeavyBall(0.3, 0.7), bl.HeavyBall(0.1, 1.0)], ids=str)
@pytest.mark.parametrize("steps", [1, 2, 37, 256])
@pytest.mark.parametrize(
    "spectrum", [[1.0] * 4, [1.0, 1.0 + 1e-9, 2.0, 2.0], [0.0, 0.0, 1.0, 3.0], [1e-12, 0.5, 2.0, 4.0]], ids=str
)
def test_repeated_clustered_and_zero_eigenvalues(dynamics, steps, spectrum):
    q = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(4))).Q
    base = q @ torch.diag(torch.tensor(spectrum)) @ q.T
    # λ perturbs the matrix in every direction around a spectrum where eigenvectors have no derivative.
    problem, task = quadratic(lambda lam: base + (lam + lam.T) / 2, (4,))
    agree(problem, torch.zeros(4, 4), task, dynamics, steps)


@pytest.mark.parametrize("shape", [(5, 3), (5, 12), (3, 1)])
def test_independent_columns_share_one_decomposition(shape):
    problem, task = quadratic(lambda lam: lam @ lam.T + torch.eye(shape[0]), shape)
    lam = torch.randn(shape[0], shape[0], generator=torch.Generator().manual_seed(6)) * 0.3
    agree(problem, lam, task, bl.GradientDescent(0.2), 20)
    result = bl.hypergradient(problem, lam, task, dynamics=bl.GradientDescent(0.2), steps=20, method=bl.Spectral())
    assert result.stats.products == -(-shape[0] // shape[1])


def test_a_linear_layer_with_a_bias():
    layer = torch.nn.Linear(4, 3)
    w, apply = bl.functional(layer)
    x, y = torch.randn(9, 4), torch.randn(9, 3)
    problem = bl.Problem(
        inner=lambda w, lam, b: ((apply(w, b[0]) - b[1]) ** 2).mean() + lam.exp() * (w["weight"] ** 2).sum(),
        outer=lambda w, lam, b: ((apply(w, b[0]) - b[1]) ** 2).mean(),
        init=lambda lam: w,
    )
    agree(problem, torch.tensor(-2.0), bl.Task((x, y), (x + 1, y)), bl.HeavyBall(0.1, 0.5), 15)


def test_columns_that_interact_are_noticed():
    problem = bl.Problem(
        inner=lambda w, lam, _: (w**2).sum() + lam * (w.sum() - 1) ** 2,
        outer=lambda w, lam, _: (w**3).sum(),
        init=lambda lam: torch.zeros(3, 2),
    )
    agree(problem, torch.tensor(0.3), bl.Task(None, None), bl.GradientDescent(0.1), 9)


def test_learned_step_size_and_momentum():
    problem, task = quadratic(lambda lam: torch.diag(lam["d"].exp()), (4,))
    lam = {"d": torch.tensor([0.0, 0.1, 0.1, -1.0]), "lr": torch.tensor(-2.0), "momentum": torch.tensor(0.4)}
    settings = {"dynamics": lambda lam: bl.HeavyBall(lam["lr"].exp(), lam["momentum"].sigmoid()), "steps": 40}
    found = bl.hypergradient(problem, lam, task, method=bl.Spectral(), **settings).grad
    assert relative_error(found, bl.hypergradient(problem, lam, task, method=bl.Reverse(), **settings).grad) < 1e-10
    assert relative_error(found, central_differences(lambda lam: value_of(problem, lam, task, **settings), lam)) < 1e-6


def test_a_million_steps_are_the_limit():
    problem, task = quadratic(lambda lam: torch.diag(lam.exp()), (4,))
    lam = torch.tensor([0.0, 0.1, -0.5, -1.0])
    settings = {"dynamics": bl.GradientDescent(0.5)}
    found = bl.hypergradient(problem, lam, task, steps=10**6, method=bl.Spectral(), **settings)
    limit = bl.hypergradient(problem, lam, task, steps=500, method=bl.Implicit(bl.Direct()), **settings)
    assert relative_error(found.grad, limit.grad) < 1e-10
