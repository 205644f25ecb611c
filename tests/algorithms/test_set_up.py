"""What single-loop algorithms compute before their first iteration."""

import pytest
import torch

import bilevel as bl
from bilevel.testing.single_loop import FiniteSum

FIXED = {"inner_lr": 0.2, "outer_lr": 0.1}


class Counted:
    """L = ½ Σ w² s, which counts the products with its Hessian."""

    def __init__(self, scale=1.0):
        counted = self
        self.products, self.scale = 0, scale

        class Slope(torch.autograd.Function):
            @staticmethod
            def forward(ctx, w):
                return w * counted.scale

            @staticmethod
            def backward(ctx, v):
                counted.products += 1
                return v * counted.scale

        class Square(torch.autograd.Function):
            @staticmethod
            def forward(ctx, w):
                ctx.save_for_backward(w)
                return 0.5 * counted.scale * w.square().sum()

            @staticmethod
            def backward(ctx, g):
                return g * Slope.apply(ctx.saved_tensors[0])

        self.of = Square.apply

    def solve(self, algorithm):
        generator = torch.Generator().manual_seed(0)
        data = [torch.randn(16, 6, generator=generator, dtype=torch.float64) for _ in range(2)]
        problem = bl.Problem(
            lambda w, lam, x: self.of(w - lam - x.mean(0)),
            lambda w, lam, x: (w - x.mean(0)).square().sum() + 0.1 * lam.square().sum(),
            torch.zeros_like,
        )
        task = bl.Task(*(bl.FixedBatches(rows, 2) for rows in data))
        self.products = 0
        bl.solve(problem, torch.zeros(6).double(), task, algorithm=algorithm, iterations=1, progress=False)
        return self.products


@pytest.mark.parametrize("kind", [bl.SOBA, bl.AmIGO, bl.SRBA])
def test_given_step_sizes_need_no_curvature_of_every_batch(kind):
    given, chosen = Counted().solve(kind(**FIXED)), Counted().solve(kind())
    # Eight batches and their mean have a curvature each, and an iteration of AmIGO takes 11 products.
    assert given < 30 and chosen > given + 2 * 8


def test_a_saddle_is_refused_with_given_step_sizes_too():
    with pytest.raises(bl.BilevelError, match="SOBA needs a convex inner problem"):
        Counted(scale=-1.0).solve(bl.SOBA(**FIXED))


def test_what_is_no_step_size_is_refused():
    for given, said in (("0.1", "not a step size"), (0, "inner_lr=0 is"), (float("nan"), "not a step size")):
        with pytest.raises(bl.BilevelError, match=said):
            bl.SOBA(inner_lr=given)
    schedules = ((lambda: 0.1, "takes 0 positional"), (lambda k: -0.1, "-0.1 at k = 0"), (lambda k: None, "NoneType"))
    for schedule, said in schedules:
        with pytest.raises(bl.BilevelError, match=f"outer_lr.*{said}"):
            Counted().solve(bl.SOBA(inner_lr=0.1, outer_lr=schedule))


def _error(w, lam, data):
    return ((data[0] @ w - data[1]) ** 2).mean()


# Ridge regression with a penalty for each feature.
RIDGE = bl.Problem(lambda w, lam, data: _error(w, lam, data) + (lam.exp() * w**2).sum(), _error, torch.zeros_like)


@pytest.mark.parametrize("kind", [bl.SOBA, bl.AmIGO])
def test_default_step_sizes_follow_a_lam_that_makes_the_inner_objective_steeper(kind):
    """Penalties of features that do not help grow without end, and with them the curvature of L."""
    generator = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(*shape, generator=generator).double() for shape in ((100, 10), (100,)))
    y = x[:, :3].sum(1) + 3 * noise
    problem = RIDGE
    train, val = (x[:50], y[:50]), (x[50:], y[50:])
    task = bl.Task(bl.Minibatches(train, 10), bl.Minibatches(val, 10))
    start = torch.full((10,), -3.0).double()
    found = bl.solve(problem, start, task, algorithm=kind(), iterations=40, progress=False)
    limit = {"dynamics": bl.GradientDescent(0.01), "steps": 1, "method": bl.Implicit(newton=1e-8)}
    before, after = (
        float(bl.hypergradient(problem, lam, bl.Task(train, val), **limit).value) for lam in (start, found.outer)
    )
    assert found.outcome.kind == "finished" and after < 0.9 * before
    diverged = bl.solve(problem, start, task, algorithm=kind(inner_lr=0.1), iterations=400, progress=False).outcome
    assert diverged.kind == "diverged" and "at the last λ; at the start it was" in str(diverged)


def _ridge(x, y):
    return RIDGE, bl.Task(bl.FixedBatches((x[:120], y[:120]), 5), bl.FixedBatches((x[120:], y[120:]), 5))


@pytest.mark.parametrize("row", [0, 119])
def test_data_that_are_not_finite_are_named(row):
    """In one of the batches that step sizes are chosen from, and in a batch that is drawn later."""
    x = torch.randn(160, 3, generator=torch.Generator().manual_seed(0))
    y = x.sum(1)
    x[row, 1] = float("nan")
    problem, task = _ridge(x, y)
    found = bl.solve(problem, torch.zeros(3), task, algorithm=bl.SOBA(), iterations=60, progress=False)
    assert found.outcome.kind == "diverged" and "The data of train, " in str(found.outcome)


def test_step_sizes_are_chosen_in_half_precision():
    x = torch.randn(160, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    problem, task = _ridge(x, x.sum(1))
    start = torch.zeros(3, dtype=torch.bfloat16)
    found = bl.solve(problem, start, task, algorithm=bl.SOBA(), iterations=20, progress=False)
    assert found.outcome.kind == "finished" and found.outer.dtype is torch.bfloat16
    assert found.history["value"][-1] < found.history["value"][0]


@pytest.mark.parametrize("kind", [bl.SOBA, bl.SABA, bl.SRBA])
def test_a_first_batch_without_curvature_does_not_decide_the_step_sizes(kind):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 3, generator=generator).double()
    y = x.sum(1) + 0.1 * torch.randn(64, generator=generator).double()
    x[:8] = 0
    problem = bl.Problem(
        lambda w, lam, d: lam.exp() * _error(w, lam, d) + (w**2).mean() * d[0].any(),
        lambda w, lam, d: _error(w, lam, d) + 0.1 * lam**2,
        lambda lam: torch.zeros(3).double(),
    )
    task = bl.Task(bl.FixedBatches((x, y), 8), bl.FixedBatches((x[8:], y[8:]), 8))
    found = bl.solve(problem, torch.zeros(()).double(), task, algorithm=kind(), iterations=120, progress=False)
    assert found.outcome.kind == "finished" and float(found.outer) == pytest.approx(0.594, abs=0.5)


@pytest.mark.parametrize("kind", [bl.SOBA, bl.SABA, bl.SRBA])
def test_an_example_that_is_steeper_than_all_others_bounds_the_default_step_sizes(kind):
    """It is not in one of the first eight batches, and directions grew to 2653, 2452 and 40."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 4, generator=generator).double()
    x[50] *= 30
    y = x.sum(1) + torch.randn(200, generator=generator).double()
    train, val = (x[:100], y[:100]), (x[100:], y[100:])
    task = bl.Task(bl.FixedBatches(train, 5), bl.FixedBatches(val, 5, seed=1))
    start = torch.full((4,), -3.0).double()
    found = bl.solve(RIDGE, start, task, algorithm=kind(), iterations=200, progress=False, constraint=bl.Box(-14, 8))
    assert found.outcome.kind == "finished" and found.history["gradient_norm"][-20:].max() < 20


@pytest.mark.parametrize("inner, outer", [(1e4, 1.0), (1.0, 1e4), (1e-4, 1.0)])
def test_default_step_sizes_of_bome_follow_the_scale_of_both_objectives(inner, outer):
    data = FiniteSum.drawn(8, 0.1)
    plain = data.problem
    scaled = bl.Problem(
        lambda w, lam, d: inner * plain.inner(w, lam, d), lambda w, lam, d: outer * plain.outer(w, lam, d), plain.init
    )
    task, start = bl.Task(data.train, data.val), {"x": torch.ones(2).double()}
    found = bl.solve(scaled, start, task, algorithm=bl.BOME(), iterations=100, progress=False)
    assert float((found.outer["x"] - data.solution).norm() / data.solution.norm()) < 0.05


def test_a_given_step_size_of_a_lam_without_curvature_is_named():
    linear = bl.Problem(lambda w, lam, x: ((w - lam) ** 2).sum(), lambda w, lam, x: w.sum(), torch.zeros_like)
    nothing, algorithm = bl.Task(None, None), bl.SOBA(inner_lr=0.9, outer_lr=1e308)
    with pytest.raises(bl.DivergenceError, match=r"outer_lr = 1e\+308 has no known bound, because f has no curvature"):
        bl.solve(linear, torch.zeros(2).double(), nothing, algorithm=algorithm, iterations=99, raise_on_failure=True)
