"""Spectral: exact at any T, for repeated and zero eigenvalues, many columns, learned settings."""

import pytest
import torch

import bilevel as bl
from bilevel.hypergradients import value_of
from bilevel.methods.spectral.functions import iterate
from bilevel.methods.spectral.krylov import iterate_all
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


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 8, 50, 129])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("factor", [0.0, 1.0, 2.1], ids=["no step", "stable", "diverging"])
def test_all_iterates_and_the_decomposition_give_the_same(steps, width, factor):
    """The two ways to w_T and to the cotangents of A, w_0, the step size, and b or g = A w_0 − b."""
    generator = torch.Generator().manual_seed(8)
    root = torch.randn(3, 6, generator=generator)
    target, start, cotangent = torch.randn(3, 6, width, generator=generator)
    # Singular, with half of its eigenvalues zero.
    matrix = root.T @ root
    lr = factor / torch.linalg.eigvalsh(matrix)[-1]
    slow = iterate(matrix, target, start, lr, torch.tensor(0.0), steps, plain=True)
    fast = iterate_all(matrix, matrix @ start - target, start, lr, steps)
    assert relative_error(fast.w, slow.w) < 1e-10
    in_matrix, in_slope, *others = fast.pull_back(cotangent, True)
    through = in_slope @ start.T
    found = [in_matrix + (through + through.T) / 2, -in_slope, *others]
    for one, other in zip(found, slow.pull_back(cotangent, True)[:4], strict=True):
        assert relative_error(one, other) < 1e-10


@pytest.mark.parametrize("steps", [1, 2, 50, 170, 500])
def test_a_start_that_is_nearly_forgotten(steps):
    """Its gradient falls to 1e-150 in the longest run and must not become rounding noise."""
    problem, task = quadratic(lambda lam: torch.diag(torch.tensor([1.0, 1.5, 2.0, 1.2])), (4,))
    problem = bl.Problem(problem.inner, problem.outer, lambda lam: lam)
    agree(problem, torch.ones(4), task, bl.GradientDescent(0.5), steps)


@pytest.mark.parametrize("steps", [1, 40, 600])
def test_a_learned_step_size_without_momentum(steps):
    """600 steps are more than are computed one by one."""
    problem, task = quadratic(lambda lam: torch.diag(lam["d"].exp()), (4,))
    lam = {"d": torch.tensor([0.0, 0.1, 0.1, -1.0]), "lr": torch.tensor(-4.0)}
    settings = {"dynamics": lambda lam: bl.GradientDescent(lam["lr"].exp()), "steps": steps}
    found = bl.hypergradient(problem, lam, task, method=bl.Spectral(), **settings).grad
    assert relative_error(found, bl.hypergradient(problem, lam, task, **settings).grad) < 1e-10
    assert relative_error(found, central_differences(lambda lam: value_of(problem, lam, task, **settings), lam)) < 1e-6


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


@pytest.mark.parametrize("steps", [1, 40])
def test_learned_step_size_and_momentum(steps):
    problem, task = quadratic(lambda lam: torch.diag(lam["d"].exp()), (4,))
    lam = {"d": torch.tensor([0.0, 0.1, 0.1, -1.0]), "lr": torch.tensor(-2.0), "momentum": torch.tensor(0.4)}
    settings = {"dynamics": lambda lam: bl.HeavyBall(lam["lr"].exp(), lam["momentum"].sigmoid()), "steps": steps}
    # The first step has no velocity yet, so one step does not see the momentum.
    found = bl.hypergradient(problem, lam, task, method=bl.Spectral(), allow_unused=True, **settings).grad
    expected = bl.hypergradient(problem, lam, task, method=bl.Reverse(), allow_unused=True, **settings).grad
    assert relative_error(found, expected) < 1e-10
    assert relative_error(found, central_differences(lambda lam: value_of(problem, lam, task, **settings), lam)) < 1e-6


def test_a_million_steps_are_the_limit():
    problem, task = quadratic(lambda lam: torch.diag(lam.exp()), (4,))
    lam = torch.tensor([0.0, 0.1, -0.5, -1.0])
    settings = {"dynamics": bl.GradientDescent(0.5)}
    found = bl.hypergradient(problem, lam, task, steps=10**6, method=bl.Spectral(), **settings)
    limit = bl.hypergradient(problem, lam, task, steps=500, method=bl.Implicit(bl.Direct()), **settings)
    assert relative_error(found.grad, limit.grad) < 1e-10


class TestCoincidences:
    """What happens to hold at the first λ need not hold around it."""

    @pytest.mark.parametrize("shape", [(3,), (4, 3)], ids=["a penalty per output", "a penalty per entry"])
    def test_columns_that_share_a_matrix_only_where_lam_is_zero(self, shape):
        x, y = torch.randn(9, 4), torch.randn(9, 3)
        problem = bl.Problem(
            lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean() * 3 + (lam.exp() * w**2).sum(),
            lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean(),
            lambda lam: torch.zeros(4, 3),
        )
        task = bl.Task((x, y), (x + 0.5, y))
        for lam in (torch.zeros(shape), torch.linspace(-2, 1, shape[-1]).expand(shape).clone()):
            agree(problem, lam, task, bl.GradientDescent(0.05), 30)

    def test_steps_that_are_learned_one_by_one_and_start_equal(self):
        problem, task = quadratic(lambda lam: torch.diag(lam["d"].exp()), (4,))
        lam = {"d": torch.zeros(4), "lr": torch.full((25,), 0.05)}
        settings = {"dynamics": lambda lam: bl.GradientDescent(lambda t: lam["lr"][t - 1]), "steps": 25}
        with pytest.raises(bl.BilevelError, match="each step may have its own"):
            bl.hypergradient(problem, lam, task, method=bl.Spectral(), **settings)
        auto = bl.hypergradient(problem, lam, task, method="auto", **settings)
        assert relative_error(auto.grad, bl.hypergradient(problem, lam, task, **settings).grad) < 1e-10

    @pytest.mark.parametrize(("start", "scale"), [(30.0, 1.0), (0.0, 20.0), (0.0, 2000.0)])
    def test_a_loss_that_is_quadratic_in_places(self, start, scale):
        """Huber's loss: whoever never leaves one of its pieces gets the right number, whoever does is refused."""
        torch.manual_seed(0)
        x, y = torch.randn(9, 3), scale * torch.randn(9)
        problem = bl.Problem(
            lambda w, lam, b: torch.nn.functional.huber_loss(b[0] @ w, b[1], delta=10.0) + lam.exp() * (w**2).sum(),
            lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean(),
            lambda lam: torch.full((3,), start),
        )
        task, settings = bl.Task((x, y), (x + 0.5, y)), {"dynamics": bl.GradientDescent(0.05), "steps": 30}
        lam = torch.tensor(-3.0)
        expected = bl.hypergradient(problem, lam, task, method=bl.Unrolled(), **settings).grad
        try:
            found = bl.hypergradient(problem, lam, task, method=bl.Spectral(), **settings).grad
        except bl.BilevelError as error:
            assert "quadratic" in str(error)
        else:
            assert relative_error(found, expected) < 1e-10
        auto = bl.hypergradient(problem, lam, task, method="auto", **settings).grad
        assert relative_error(auto, expected) < 1e-10

    def test_a_second_call_with_another_schedule_or_with_minibatches(self):
        x, y = torch.randn(12, 3), torch.randn(12)
        problem = bl.Problem(
            lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean() + (lam.exp() * w**2).sum(),
            lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean(),
            lambda lam: torch.zeros(3),
        )
        task, lam = bl.Task((x, y), (x, y)), torch.zeros(3)

        def ask(dynamics, task=task):
            return bl.hypergradient(problem, lam, task, dynamics=dynamics, steps=20, method=bl.Spectral())

        def decaying(rate):
            return bl.GradientDescent(lambda t: 0.05 * rate**t)

        ask(decaying(1.0))
        with pytest.raises(bl.BilevelError, match="change with t"):
            ask(decaying(0.8))
        with pytest.raises(bl.BilevelError, match="function of t"):
            ask(decaying(1.0), bl.Task(bl.Minibatches((x, y), 5), (x, y)))
        with pytest.raises(bl.BilevelError, match="not Nesterov"):
            ask(bl.Nesterov(0.05))

    def test_its_result_cannot_be_continued(self):
        problem, task = quadratic(lambda lam: torch.diag(lam.exp()), (4,))
        settings = {"dynamics": bl.HeavyBall(0.05, 0.9), "steps": 30}
        first = bl.hypergradient(problem, torch.zeros(4), task, method=bl.Spectral(), **settings)
        with pytest.raises(bl.BilevelError, match="cannot be continued"):
            bl.hypergradient(problem, torch.zeros(4), task, start=first, **settings)
        with pytest.raises(bl.BilevelError, match="online"):
            bl.solve(problem, torch.zeros(4), task, start="online", method="auto", **settings)


def test_columns_that_share_a_matrix_with_some_data_only():
    generator = torch.Generator().manual_seed(8)
    inputs, targets = torch.randn(20, 4, generator=generator), torch.randn(20, 3, generator=generator)
    mask = (torch.rand(20, 3, generator=generator) < 0.5).double()
    problem = bl.Problem(
        lambda w, lam, b: ((b[2] * (b[0] @ w - b[1] * lam[0])) ** 2).mean() + 0.1 * (w**2).sum(),
        lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean() + (lam**2).sum(),
        lambda lam: torch.zeros(4, 3),
    )
    settings = {"dynamics": bl.GradientDescent(0.1), "steps": 12}
    for weights, lam in ((torch.ones(20, 3), torch.ones(4)), (mask, torch.zeros(4)), (mask, torch.ones(4))):
        task = bl.Task((inputs, targets, weights), (inputs, targets))
        ours = bl.hypergradient(problem, lam, task, method=bl.Spectral(), **settings, allow_unused=True)
        plain = bl.hypergradient(problem, lam, task, method=bl.Unrolled(), **settings, allow_unused=True)
        assert torch.allclose(ours.grad, plain.grad, rtol=1e-10, atol=1e-13)
