"""Unusual but legal: precisions, layouts, trees, extreme numbers, and the surroundings of a call."""

import collections
import contextlib
from dataclasses import replace

import pytest
import torch
from comparing import EXACT, NO_DATA, agree, close, draw, regression, slope, squares, unrolled, zeros

import bilevel as bl
from bilevel import trees

TASK = regression(12, 4)
RUN = {"dynamics": bl.HeavyBall(0.1, 0.5), "steps": 12}
LAM = torch.tensor([-1.0, 0.0, -2.0, 0.5], dtype=torch.float64)


def ridge(w, lam, data):
    return squares(w, lam, data) + 0.5 * (lam.exp() * w**2).sum()


def heavy_ball(inner, w, steps=12):
    """The steps of `RUN`, written out for a single tensor."""
    w, velocity = w.clone().requires_grad_(), torch.zeros_like(w)
    for _ in range(steps):
        (g,) = torch.autograd.grad(inner(w), w, create_graph=True)
        velocity = 0.5 * velocity - 0.1 * g
        w = w + velocity
    return w


PROBLEM = bl.Problem(ridge, squares, zeros(4))
EXPECTED = slope(
    lambda lam: squares(
        heavy_ball(lambda w: ridge(w, lam, TASK.train), torch.zeros(4, dtype=torch.float64)), None, TASK.val
    ),
    LAM,
)


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.1), (torch.float16, 0.02)], ids=str
)
@pytest.mark.parametrize("method", [*EXACT, bl.Reversible()], ids=str)
def test_lower_precision(method, dtype, tolerance):
    task = trees.map(lambda leaf: leaf.to(dtype), TASK)
    problem = bl.Problem(ridge, squares, lambda lam: torch.zeros(4, dtype=dtype))
    found = bl.hypergradient(problem, LAM.to(dtype), task, method=method, **RUN)
    assert found.grad.dtype == dtype and found.value.dtype == dtype
    close(found.grad.double(), EXPECTED.grad, tolerance)


@pytest.mark.parametrize("low", ["λ", "w", "part of λ", "part of w"])
@pytest.mark.parametrize("method", EXACT, ids=str)
def test_two_precisions_in_one_problem(method, low):
    single = lambda tensor, where: tensor.float() if low in (where, f"part of {where}") else tensor  # noqa: E731
    first = lambda tensor, where: single(tensor, where) if low == where else tensor  # noqa: E731
    lam = {"a": single(LAM[:2], "λ"), "b": first(LAM[2:], "λ")}
    start = lambda lam: {"a": single(torch.zeros(2), "w"), "b": first(torch.zeros(2), "w")}  # noqa: E731
    joined = lambda tree: torch.cat([tree["a"].double(), tree["b"].double()])  # noqa: E731
    problem = bl.Problem(
        lambda w, lam, data: ridge(joined(w), joined(lam), data),
        lambda w, lam, data: squares(joined(w), lam, data),
        start,
    )
    found = bl.hypergradient(problem, lam, TASK, method=method, **RUN)
    assert [leaf.dtype for leaf in found.grad.values()] == [leaf.dtype for leaf in lam.values()]
    close(joined(found.grad), EXPECTED.grad, 1e-5)


LAYOUTS = {
    "every second number of λ": lambda x: torch.stack([x, x], 1).flatten()[::2],
    "a column as λ": lambda x: torch.stack([x, x], 1)[:, 0],
    "λ that requires grad": lambda x: x.clone().requires_grad_(),
    "a parameter as λ": lambda x: torch.nn.Parameter(x.clone()),
    "λ as the result of a computation": lambda x: (x.clone().requires_grad_() + 1) - 1,
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_lam(name):
    agree(EXPECTED, PROBLEM, LAYOUTS[name](LAM), TASK, tolerance=1e-10, **RUN)


def test_data_that_are_transposed_views():
    train = (TASK.train[0].T.contiguous().T, TASK.train[1].flip(0).flip(0))
    agree(EXPECTED, PROBLEM, LAM, bl.Task(train, TASK.val), tolerance=1e-10, **RUN)


def test_a_start_that_is_one_number_expanded():
    problem = bl.Problem(ridge, squares, lambda lam: torch.zeros(1).expand(4))
    agree(EXPECTED, problem, LAM, TASK, tolerance=1e-10, **RUN)


Pair = collections.namedtuple("Pair", ["left", "right"])


def nested(lam):
    return Pair(left={"deep": [lam[0], lam[1:2]]}, right=collections.OrderedDict(z=lam[2:3].reshape(1, 1), a=(lam[3],)))


def flat(tree):
    parts = [*tree.left["deep"], tree.right["z"], tree.right["a"][0]]
    return torch.cat([part.reshape(-1) for part in parts])


def test_trees_of_named_tuples_dicts_lists_and_numbers():
    problem = bl.Problem(
        lambda w, lam, data: ridge(flat(w), flat(lam), data),
        lambda w, lam, data: squares(flat(w), None, data),
        lambda lam: nested(torch.zeros(4)),
    )
    agree(EXPECTED._replace(grad=nested(EXPECTED.grad)), problem, nested(LAM), TASK, tolerance=1e-10, **RUN)


def test_dicts_whose_keys_are_of_several_types():
    split = lambda x: {"a": x[:2], 1: x[2:3], (0, "b"): x[3:]}  # noqa: E731
    join = lambda tree: torch.cat([tree["a"], tree[1], tree[(0, "b")]])  # noqa: E731
    problem = bl.Problem(
        lambda w, lam, data: ridge(join(w), join(lam), data),
        lambda w, lam, data: squares(join(w), None, data),
        lambda lam: split(torch.zeros(4)),
    )
    agree(EXPECTED._replace(grad=split(EXPECTED.grad)), problem, split(LAM), TASK, tolerance=1e-10, **RUN)


def test_a_step_that_returns_its_dict_in_another_order():
    lam, task = torch.tensor(-1.0), regression(10, 2)
    inner = lambda w, lam, data: ((data[0] @ torch.stack([w["a"], w["b"]]) - data[1]) ** 2).mean() * lam.exp()  # noqa: E731

    def step(loss, w, state, t):
        g = bl.gradient(loss, w)
        return {"b": w["b"] - 0.2 * g["b"], "a": w["a"] - 0.1 * g["a"]}, state

    def plain(lam):
        rates = {"a": torch.tensor(0.1), "b": torch.tensor(0.2)}
        start = {"a": torch.zeros(()), "b": torch.zeros(())}
        w = unrolled(lambda w, t: inner(w, lam, task.train), start, 5, rates)
        return inner(w, torch.tensor(0.0), task.val)

    problem = bl.Problem(
        inner,
        lambda w, lam, data: inner(w, torch.tensor(0.0), data),
        lambda lam: {"a": torch.zeros(()), "b": torch.zeros(())},
    )
    agree(slope(plain, lam), problem, lam, task, dynamics=step, steps=5, tolerance=1e-10)


def test_lam_in_the_start_the_inner_and_the_outer_objective_and_the_rate():
    lam = torch.tensor([0.5, -0.3, 0.2, 0.1])
    outer = lambda w, lam, data: squares(w, lam, data) * lam.exp().sum()  # noqa: E731

    def plain(lam):
        rate = 0.05 * lam.exp().mean()
        return outer(unrolled(lambda w, t: ridge(w, lam, TASK.train), lam.sin(), 6, rate), lam, TASK.val)

    agree(
        slope(plain, lam),
        bl.Problem(ridge, outer, lambda lam: lam.sin()),
        lam,
        TASK,
        dynamics=lambda lam: bl.GradientDescent(0.05 * lam.exp().mean()),
        steps=6,
        methods=(*EXACT, bl.Spectral()),
        tolerance=1e-10,
    )


def test_no_steps_at_all():
    """f_0(λ) = E(Φ_0(λ), λ)."""
    problem = bl.Problem(ridge, lambda w, lam, data: squares(w, lam, data) + lam.sum(), lambda lam: lam**2)
    expected = slope(lambda lam: squares(lam**2, lam, TASK.val) + lam.sum(), LAM)
    agree(expected, problem, LAM, TASK, dynamics=bl.GradientDescent(0.1), steps=0, tolerance=1e-12)


LONG = {
    "Reverse": (bl.Reverse(), 5_000),
    "Reverse from few checkpoints": (bl.Reverse("sqrt", group_bytes=0), 1_000),
    "Forward": (bl.Forward(), 1_000),
    "Reversible": (bl.Reversible(), 1_000),
    "Spectral": (bl.Spectral(), 100_000),
}


@pytest.mark.parametrize("name", LONG)
def test_thousands_of_steps(name):
    """v ← v/2 − η e^λ (w − 1), w ← w + v: a power of a 2 × 2 matrix, with T·η of the order of 1."""
    method, steps = LONG[name]
    rate, lam = 1 / steps, torch.tensor(0.3)

    def plain(lam):
        matrix = torch.stack([1 - rate * lam.exp(), torch.tensor(0.5), -rate * lam.exp(), torch.tensor(0.5)])
        return (1 + (torch.linalg.matrix_power(matrix.reshape(2, 2), steps) @ torch.tensor([-1.0, 0.0]))[0]) ** 3

    problem = bl.Problem(
        lambda w, lam, data: 0.5 * lam.exp() * (w - 1) ** 2, lambda w, lam, data: w**3, lambda lam: torch.zeros(())
    )
    agree(
        slope(plain, lam),
        problem,
        lam,
        dynamics=bl.HeavyBall(rate, 0.5),
        steps=steps,
        methods=[method],
        tolerance=1e-8,
    )


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1e6, 1e9])
def test_weights_that_are_tiny_or_huge(scale):
    problem = bl.Problem(
        lambda w, lam, data: ridge(w / scale, lam, data) * scale**2,
        lambda w, lam, data: squares(w / scale, lam, data),
        zeros(4),
    )
    agree(EXPECTED, problem, LAM, TASK, methods=(*EXACT, bl.Reversible(), bl.Spectral()), tolerance=1e-8, **RUN)


def test_a_filter_in_the_frequency_domain():
    """Complex numbers inside the inner objective; w and λ are real."""
    signal, lam = draw(8), torch.tensor(0.2)
    inner = lambda w, lam, data: torch.fft.fft(w - signal).abs().square().mean() + lam.exp() * (w**4).sum()  # noqa: E731
    outer = lambda w, lam, data: (torch.fft.rfft(w) * torch.fft.rfft(signal).conj()).real.sum()  # noqa: E731

    def plain(lam):
        return outer(unrolled(lambda w, t: inner(w, lam, None), torch.zeros(8), 5, 0.02), None, None)

    agree(
        slope(plain, lam),
        bl.Problem(inner, outer, zeros(8)),
        lam,
        dynamics=bl.GradientDescent(0.02),
        steps=5,
        tolerance=1e-10,
    )


def test_vmap_and_functional_call_inside_the_objectives():
    layer = torch.nn.Linear(4, 1, bias=False).double()

    def each(w, x, y):
        return (torch.func.functional_call(layer, {"weight": w[None]}, (x,)).squeeze() - y) ** 2

    def error(w, lam, data):
        return 0.5 * torch.vmap(each, in_dims=(None, 0, 0))(w, *data).mean()

    problem = bl.Problem(lambda w, lam, data: error(w, lam, data) + 0.5 * (lam.exp() * w**2).sum(), error, zeros(4))
    agree(EXPECTED, problem, LAM, TASK, tolerance=1e-10, **RUN)


@pytest.mark.parametrize(
    "surroundings",
    [torch.no_grad, torch.enable_grad, lambda: torch.device("cpu")],
    ids=["no_grad", "enable_grad", "a default device"],
)
def test_the_surroundings_of_the_call_do_not_matter(surroundings):
    with surroundings():
        agree(EXPECTED, PROBLEM, LAM, TASK, tolerance=1e-10, **RUN)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_under_anomaly_detection():
    with torch.autograd.detect_anomaly():
        agree(EXPECTED, PROBLEM, LAM, TASK, methods=[bl.Unrolled(), bl.Reverse()], tolerance=1e-10, **RUN)


def test_under_autocast_the_gradient_is_right_to_half_precision():
    def linear(w, data):  # a matrix product, which autocast computes in bfloat16
        return (data[0] @ w[:, None])[:, 0]

    inner = lambda w, lam, data: 0.5 * ((linear(w, data) - data[1]) ** 2).mean() + 0.5 * (lam.exp() * w**2).sum()  # noqa: E731
    outer = lambda w, lam, data: 0.5 * ((linear(w, data) - data[1]) ** 2).mean()  # noqa: E731
    task = trees.map(torch.Tensor.float, TASK)
    problem = bl.Problem(inner, outer, lambda lam: torch.zeros(4, dtype=torch.float32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for method in EXACT:
            found = bl.hypergradient(problem, LAM.float(), task, method=method, **RUN)
            close(found.grad.double(), EXPECTED.grad, 0.03, method)


def test_forward_mode_under_autocast():
    """Both products with the Jacobian are rounded to half precision, and differ by as much."""
    x, y = draw(5, 8).float(), draw(5, 3).float()
    error = lambda w, lam, data: ((lam @ w - y) ** 2).mean()  # noqa: E731
    problem = bl.Problem(error, lambda w, lam, data: ((x @ w - y) ** 2).mean(), lambda lam: torch.zeros(8, 3).float())
    settings = {"dynamics": bl.GradientDescent(0.5), "steps": 20}
    for seed in range(3):
        lam = torch.randn(5, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
        expected = bl.hypergradient(problem, lam, NO_DATA, **settings).grad
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = bl.hypergradient(replace(problem), lam, NO_DATA, method=bl.Forward(), **settings).grad
        close(found, expected, 0.05)


def test_inference_mode_is_refused():
    with torch.inference_mode(), pytest.raises(bl.BilevelError, match="inference_mode"):
        bl.hypergradient(PROBLEM, LAM, TASK, **RUN)


def test_complex_variables_are_refused():
    problem = bl.Problem(
        lambda w, lam, data: (w - lam).abs().square().sum(),
        lambda w, lam, data: w.abs().sum(),
        lambda lam: lam.detach(),
    )
    with pytest.raises(bl.BilevelError, match="complex"):
        bl.hypergradient(problem, draw(3) * 1j, NO_DATA, **RUN)


def test_data_that_come_as_a_function_of_the_step():
    x, y = TASK.train
    batch = lambda t: (x.roll(t, 0)[:6], y.roll(t, 0)[:6])  # noqa: E731

    def plain(lam):
        return squares(unrolled(lambda w, t: ridge(w, lam, batch(t)), torch.zeros(4), 7, 0.1), None, TASK.val)

    agree(
        slope(plain, LAM),
        PROBLEM,
        LAM,
        bl.Task(batch, TASK.val),
        dynamics=bl.GradientDescent(0.1),
        steps=7,
        tolerance=1e-10,
    )


def test_features_that_are_encoded_once():
    lam = 0.3 * draw(4, 3)
    encoded = bl.Problem(
        lambda w, lam, data: squares(w, lam, data) + 0.05 * (w**2).sum(),
        squares,
        zeros(3),
        encode=lambda lam, task: bl.Task(
            (torch.tanh(task.train[0] @ lam), task.train[1]), (torch.tanh(task.val[0] @ lam), task.val[1])
        ),
    )

    def plain(lam):
        train, val = ((torch.tanh(part[0] @ lam), part[1]) for part in (TASK.train, TASK.val))
        w = unrolled(lambda w, t: squares(w, None, train) + 0.05 * (w**2).sum(), torch.zeros(3), 9, 0.3)
        return squares(w, None, val)

    agree(
        slope(plain, lam),
        encoded,
        lam,
        TASK,
        dynamics=bl.GradientDescent(0.3),
        steps=9,
        methods=(*EXACT, bl.Spectral()),
        tolerance=1e-10,
    )


def test_a_run_that_is_continued_is_one_run():
    """Six steps and six more, with the tangents of forward mode carried along, are twelve."""
    half = {**RUN, "steps": 6}
    first = bl.hypergradient(PROBLEM, LAM, TASK, method=bl.Forward(), **half)
    second = bl.hypergradient(PROBLEM, LAM, TASK, method=bl.Forward(), start=first, **half)
    close(second.grad, EXPECTED.grad, 1e-10)


def test_nothing_of_the_users_is_changed():
    lam, train = LAM.clone().requires_grad_(), tuple(part.clone() for part in TASK.train)
    with contextlib.suppress(bl.BilevelError):
        bl.hypergradient(PROBLEM, lam, bl.Task(train, TASK.val), **RUN)
    assert lam.grad is None and torch.equal(lam, LAM)
    assert all(torch.equal(one, two) for one, two in zip(train, TASK.train, strict=True))
