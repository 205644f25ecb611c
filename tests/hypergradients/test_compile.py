"""`bilevel.compile`: the numbers of the eager methods, and refusals where the code no longer fits."""

import gc
import math
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pandas
import pytest
import torch

import bilevel as bl
from bilevel import trees
from bilevel.engine.kernels import _broadcast_product, compile_function
from bilevel.hypergradients import value_of
from bilevel.methods import compiled_blocks
from bilevel.methods.spectral import compiled as compiled_spectral
from bilevel.testing import central_differences, relative_error
from bilevel.testing.problems import examples
from tracing import traced

METHODS = [bl.Spectral(), bl.Reverse()]


@pytest.fixture
def traced_only(monkeypatch):
    """Trace and do not compile."""
    calls = []

    def trace(function, inputs):
        calls.append(function)
        return traced(function, inputs)

    monkeypatch.setattr(compiled_spectral, "compile_function", trace)
    monkeypatch.setattr(compiled_blocks, "compile_function", trace)
    return calls


def data(width=None):
    generator = torch.Generator().manual_seed(3)
    shape = (9,) if width is None else (9, width)
    x, y = torch.randn(9, 4, generator=generator), torch.randn(*shape, generator=generator)
    return bl.Task((x, y), (x + 0.5, y))


def ridge(penalty=lambda w, lam: (lam.exp() * w**2).sum(), init=lambda lam: torch.full((4,), 0.2)):
    return bl.Problem(
        inner=lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean() + penalty(w, lam),
        outer=lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean(),
        init=init,
    )


def compiled(problem, lam, task=None, *, dynamics=None, steps=30, block=4, **more):
    """The compiled hypergradient, and a function that gives the eager one of `Unrolled`.

    Tracing takes time for each step of a block, and few steps show what many do.
    """
    call = {"dynamics": dynamics or bl.GradientDescent(0.05), "steps": steps}
    fast = bl.compile(problem, lam, task or data(), **call, block=block, **more)
    return fast, lambda lam, task=None: bl.hypergradient(problem, lam, task or data(), method=bl.Unrolled(), **call)


def assert_equal(fast, slow, tolerance=1e-10):
    assert relative_error(fast.grad, slow.grad) < tolerance
    assert relative_error(fast.inner, slow.inner) < tolerance
    assert torch.allclose(fast.value, slow.value, rtol=tolerance)


# --------------------------------------------------------------------------------------------- really compiled code


def test_blocks_of_steps():
    """With auxiliary variables, and a step size that is learned and falls."""

    def dynamics(lam):
        return bl.Adam(lambda t: (0.1 + 0.01 * lam["shift"] ** 2) / (1 + t))

    example = examples()[1]
    # 7 steps are three blocks of two, and one eager step before them.
    fast, slow = compiled(example.problem, example.lam, example.task, dynamics=dynamics, steps=7, block=2)
    assert_equal(fast(example.lam, example.task), slow(example.lam, example.task))


def test_spectral_with_other_lam_layouts_and_data():
    example = examples()[0]
    # Heavy ball takes ten times as long to compile; `test_learned_starts_and_settings` has both.
    settings = {"dynamics": bl.GradientDescent(0.2), "steps": 40}
    fast, slow = compiled(example.problem, example.lam, example.task, method=bl.Spectral(), **settings)
    x, y = example.task.train
    tasks = [example.task, bl.Task((x.T.contiguous().T, y), example.task.val), bl.Task((-x, 2 * y), example.task.val)]
    for task in tasks:
        for shift in (0.0, 0.3):
            lam = trees.map(lambda leaf, shift=shift: leaf + shift, example.lam)
            assert_equal(fast(lam, task), slow(lam, task))


def test_captured_tensors_are_read_at_every_call_and_updates_in_place_compiled():
    """With columns, so that batches of products with one matrix occur."""
    scale = torch.tensor(1.0)

    def penalty(w, lam):
        total = torch.zeros(4)
        total += scale * lam.exp() * (w**2).sum(1)
        return total.sum()

    lam = torch.linspace(-1, 0.5, 4)
    fast, slow = compiled(ridge(penalty, lambda lam: torch.zeros(4, 2)), lam, data(2), method=bl.Spectral())
    for value in (1.0, 2.0):
        scale.fill_(value)
        assert_equal(fast(lam, data(2)), slow(lam, data(2)))
    scale.data = torch.full((1,), 3.0)
    with pytest.raises(bl.BilevelError, match="another shape, dtype or device now"):
        fast(lam, data(2))


def test_a_torch_without_the_private_parts_of_its_compiler(monkeypatch):
    def not_there(*_):
        raise ImportError("cannot import name 'compile_fx_inner'")

    monkeypatch.setattr("bilevel.engine.kernels._call_inductor", not_there)
    kernel = compile_function(lambda x, y: [x * y, (x + y).sum()], [torch.ones(3), torch.ones(3)])
    x, y = torch.arange(3.0), torch.tensor([1.0, -2.0, 0.5])
    product, total = kernel(x, y)
    assert torch.equal(product, x * y) and float(total) == float((x + y).sum())


def test_numbers_in_negated_views():
    z = torch.tensor(1 + 2j, dtype=torch.complex128)
    kernel = compile_function(lambda x: [x * 2], [z.imag])
    assert float(kernel(z.conj().imag)[0]) == -4.0


@pytest.mark.parametrize("look", [lambda x: x.item(), lambda x: x.tolist(), lambda x: float(x.detach().numpy())])
def test_numbers_are_never_fixed(look):
    with pytest.raises(bl.BilevelError, match="numbers in tensors are not known"):
        compile_function(lambda x: [x * look(x)], [torch.tensor(2.0)])


@pytest.mark.parametrize("look", [float, bool, lambda x: math.exp(x), lambda x: x[None][0].item()])
def test_numbers_of_captured_tensors_are_never_fixed(look):
    captured = torch.tensor(2.0)
    with pytest.raises(bl.BilevelError, match="numbers in tensors are not known"):
        compile_function(lambda x: [x * look(captured)], [torch.tensor(2.0)])


@pytest.mark.parametrize(
    "draw", [torch.rand_like, torch.nn.functional.dropout, torch.bernoulli], ids=lambda f: f.__name__
)
def test_random_numbers_are_never_compiled(draw):
    def function(x):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return [x * draw(x)]

    with pytest.raises(bl.BilevelError, match="draws random numbers"):
        compile_function(function, [torch.tensor(0.5)])


def test_products_with_one_matrix():
    generator = torch.Generator().manual_seed(1)
    one, many = torch.randn(3, 4, generator=generator), torch.randn(5, 4, 2, generator=generator)
    assert torch.allclose(_broadcast_product(one.expand(5, 3, 4), many), one @ many)
    assert torch.allclose(_broadcast_product(many.mT, one.T.expand(5, 4, 3)), many.mT @ one.T)
    assert _broadcast_product(one.repeat(5, 1, 1), many) is NotImplemented


# --------------------------------------------------------------------------------------------- traced code


def test_minibatches(traced_only):
    example = examples()[2]
    fast, slow = compiled(example.problem, example.lam, example.task, dynamics=bl.HeavyBall(0.1, 0.5), steps=6, block=2)
    count = len(traced_only)
    for shift in (0.0, 0.3):
        lam = {k: v + shift for k, v in example.lam.items()}
        assert_equal(fast(lam, example.task), slow(lam, example.task))
    assert len(traced_only) == count == 2


@pytest.mark.parametrize("steps", [30, 200])
def test_learned_starts_and_settings(traced_only, steps):
    problem = ridge(lambda w, lam: (lam["d"].exp() * w**2).sum(), lambda lam: lam["w"].tanh())
    lam = {"d": torch.linspace(-1, 0.5, 4), "w": torch.ones(4), "lr": torch.tensor(-5.0), "m": torch.tensor(0.2)}
    for dynamics in (
        lambda lam: bl.HeavyBall(lam["lr"].exp(), lam["m"].sigmoid()),
        lambda lam: bl.GradientDescent(lam["lr"].exp() + 0 * lam["m"]),
    ):
        fast, slow = compiled(problem, lam, dynamics=dynamics, steps=steps, method=bl.Spectral())
        found = fast(lam, data())
        assert_equal(found, slow(lam))
        if steps == 30:
            truth = central_differences(
                lambda lam, d=dynamics: value_of(problem, lam, data(), dynamics=d, steps=30), lam
            )
            assert relative_error(found.grad, truth) < 1e-6


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
class TestBothMethods:
    def test_in_solve(self, traced_only, method):
        problem, lam = ridge(), torch.linspace(-1, 0.5, 4)
        call = {"dynamics": bl.GradientDescent(0.05), "steps": 30}
        fast = bl.compile(problem, lam, data(), method=method, **call)  # with the default length of a block
        call["iterations"] = 5
        one, two = (bl.solve(problem, lam, data(), method=m, **call) for m in (fast.method, bl.Unrolled()))
        assert relative_error(one.outer, two.outer) < 1e-10
        assert len(traced_only) == (1 if isinstance(method, bl.Spectral) else 2)

    def test_other_starts_and_data(self, traced_only, method):
        begin = torch.full((4,), 0.2)
        problem, lam = ridge(init=lambda lam: begin), torch.zeros(4)
        fast, slow = compiled(problem, lam, method=method)
        begin = torch.full((4,), -3.0)
        x, y = data().train
        for task in (data(), bl.Task((-x, y), (x, y))):
            assert_equal(fast(lam + 1, task), slow(lam + 1, task))
        settings = {"dynamics": bl.GradientDescent(0.05), "steps": 30}
        warm = bl.hypergradient(problem, lam, data(), start=torch.ones(4), **settings)
        assert_equal(fast(lam, data(), start=torch.ones(4)), warm)

    def test_a_changed_number_is_noticed_by_the_check(self, traced_only, method):
        factor = 1.0
        problem, lam = ridge(lambda w, lam: factor * (lam.exp() * w**2).sum()), torch.zeros(4)
        fast, _ = compiled(problem, lam, method=method)
        fast.check(lam, data())
        factor = 3.0
        with pytest.raises(bl.BilevelError, match=r"call bilevel.compile\(...\) again"):
            fast.check(lam, data())

    def test_calls_of_another_form_are_refused(self, traced_only, method):
        lam = torch.zeros(4)
        fast, _ = compiled(ridge(), lam, method=method)
        x, y = data().train
        for changed in (
            {"lam": [lam]},
            {"lam": lam.float()},
            {"task": bl.Task((x[:5], y[:5]), (x, y))},
            {"task": bl.Task({0: x, 1: y}, (x, y))},
        ):
            with pytest.raises(bl.BilevelError, match="compiled for another call"):
                fast(**{"lam": lam, "task": data(), **changed})
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(bl.BilevelError, match="compiled for another call"):
            fast(lam, data())
        with pytest.raises(bl.DivergenceError, match="entries NaN or Inf"):
            fast(lam * math.nan, data())

    def test_calls_with_another_problem_or_dynamics_are_refused(self, traced_only, method):
        problem, lam, call = ridge(), torch.zeros(4), {"dynamics": bl.GradientDescent(0.05), "steps": 6}
        fast = bl.compile(problem, lam, data(), method=method, **call)
        again = replace(problem), {**call, "dynamics": bl.GradientDescent(0.05)}
        expected = bl.hypergradient(problem, lam, data(), **call).grad
        torch.testing.assert_close(
            bl.hypergradient(again[0], lam, data(), method=fast.method, **again[1]).grad, expected
        )
        others = {
            "inner": lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean() + 7 * (lam.exp() * w**2).sum(),
            "outer": lambda w, lam, b: (w**2).sum(),
            "init": lambda lam: torch.ones(4),
        }
        for name, function in others.items():
            with pytest.raises(bl.BilevelError, match="compiled for another problem"):
                bl.hypergradient(replace(problem, **{name: function}), lam, data(), method=fast.method, **call)
        for dynamics in (
            bl.GradientDescent(0.1),
            bl.GradientDescent(torch.tensor(0.05)),
            lambda lam: bl.GradientDescent(0.05),
        ):
            with pytest.raises(bl.BilevelError, match="compiled for another dynamics"):
                bl.solve(problem, lam, data(), method=fast.method, dynamics=dynamics, steps=6, iterations=1)

    def test_the_order_of_keys(self, traced_only, method):
        def inner(w, lam, b):
            (x, y), (one, two) = b.values(), lam.values()
            return ((x @ w["w"] - y) ** 2).mean() + one.exp() * (w["w"] ** 2).sum() + two * w["w"].sum()

        x, y = torch.randn(4, 4), torch.randn(4, 4)
        problem = bl.Problem(inner, lambda w, lam, b: ((w["w"] - 1) ** 2).sum(), lambda lam: {"w": torch.zeros(4, 4)})
        lam, task = {"a": torch.tensor(0.1), "b": torch.tensor(-0.4)}, bl.Task({"x": x, "y": y}, None)
        fast, slow = compiled(problem, lam, task, method=method)
        assert_equal(fast(lam, task), slow(lam, task))
        with pytest.raises(bl.BilevelError, match="compiled for another call"):
            fast(dict(reversed(lam.items())), task)
        with pytest.raises(bl.BilevelError, match="compiled for another call"):
            fast(lam, bl.Task({"y": y, "x": x}, None))

    def test_a_start_of_another_form_is_refused(self, traced_only, method):
        width = 4
        problem = bl.Problem(
            lambda w, lam, b: ((w - lam.sum()) ** 2).sum(),
            lambda w, lam, b: (w**2).sum(),
            lambda lam: torch.ones(width),
        )
        fast, _ = compiled(problem, torch.ones(2), bl.Task(None, None), method=method)
        width = 5
        with pytest.raises(bl.BilevelError, match=r"Call bilevel.compile\(...\) again"):
            fast(torch.ones(2), bl.Task(None, None))

    def test_the_code_dies_with_its_holder(self, traced_only, method):
        class Model:
            factor = 1.0

            def __init__(self):
                problem = ridge(lambda w, lam: self.factor * (lam.exp() * w**2).sum())
                self.fast, _ = compiled(problem, torch.zeros(4), method=method)

        model = Model()
        gone = weakref.ref(model)
        del model
        traced_only.clear()
        gc.collect()
        assert gone() is None

    def test_threads(self, traced_only, method):
        lam = torch.zeros(4)
        fast, slow = compiled(ridge(), lam, method=method)

        def run(shift):
            torch.set_default_dtype(torch.float64)
            return fast(lam + shift, data())

        with ThreadPoolExecutor(4) as pool:
            for shift, found in enumerate(pool.map(run, range(4))):
                assert_equal(found, slow(lam + shift))


def test_a_batch_with_settings_of_its_own(traced_only):
    @dataclass
    class Batch:
        x: torch.Tensor
        factor: float

    trees.register(Batch, ["x"])
    problem = bl.Problem(
        inner=lambda w, lam, b: ((w - b.x) ** 2).sum() + b.factor * (lam.exp() * w**2).sum(),
        outer=lambda w, lam, b: ((w - b.x) ** 2).sum(),
        init=lambda lam: torch.zeros(4),
    )
    tasks = [bl.Task(Batch(torch.ones(4), f), Batch(torch.full((4,), 0.8), f)) for f in (1.0, 3.0)]
    fast, slow = compiled(problem, torch.zeros(4), tasks[0], method=bl.Spectral())
    assert_equal(fast(torch.zeros(4), tasks[0]), slow(torch.zeros(4), tasks[0]))
    with pytest.raises(bl.BilevelError, match="compiled for another call"):
        fast(torch.zeros(4), tasks[1])


@pytest.mark.parametrize("kind", [np.asarray, pandas.DataFrame], ids=["array", "table"])
def test_long_arrays_in_a_task_are_compared_to_their_last_number(traced_only, kind):
    """repr abbreviates them."""
    one = np.random.default_rng(0).standard_normal((600, 2))
    other = one.copy()
    other[300] += 1
    problem = bl.Problem(
        inner=lambda w, lam, x: ((torch.tensor(np.asarray(x)) @ w - 1) ** 2).mean() + (lam.exp() * w**2).sum(),
        outer=lambda w, lam, x: ((torch.tensor(np.asarray(x)) @ w - 1) ** 2).mean(),
        init=lambda lam: torch.zeros(2),
    )
    fast, slow = compiled(problem, torch.zeros(2), bl.Task(kind(one), kind(one)))
    again = bl.Task(kind(one.copy()), kind(one.copy()))
    assert_equal(fast(torch.ones(2), again), slow(torch.ones(2), again))
    with pytest.raises(bl.BilevelError, match="compiled for another call"):
        fast(torch.zeros(2), bl.Task(kind(other), kind(one)))


def test_columns_that_no_longer_share_a_matrix(traced_only):
    problem = bl.Problem(
        inner=lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).sum() + (lam.exp() * b[2] * w**2).sum(),
        outer=lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).sum(),
        init=lambda lam: torch.zeros(4, 2),
    )
    x, y = data(2).train
    shared, apart = ((x, y, torch.ones(4, 2)), (x, y, torch.rand(4, 2)))
    settings = {"dynamics": bl.GradientDescent(0.02), "method": bl.Spectral()}
    fast, slow = compiled(problem, torch.zeros(()), bl.Task(shared, shared), **settings)
    assert_equal(fast(torch.zeros(()), bl.Task(shared, shared)), slow(torch.zeros(()), bl.Task(shared, shared)))
    with pytest.raises(bl.BilevelError, match=r"shared one matrix|Call bilevel.compile"):
        fast(torch.zeros(()), bl.Task(apart, apart))


def test_auto_takes_what_can_be_compiled(traced_only):
    assert compiled(ridge(), torch.zeros(4), method="auto")[0].method.eager == bl.Spectral(largest=1000)
    example = examples()[1]
    fast, _ = compiled(
        example.problem, example.lam, example.task, dynamics=bl.GradientDescent(0.1), steps=4, method="auto"
    )
    assert fast.method.eager == bl.Reverse()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block": 0}, "block=0 is not a number of steps"),
        ({"method": bl.Forward()}, "Forward has no compiled form"),
        ({"method": bl.Reverse("sqrt")}, "without checkpoints"),
        ({"steps": -1}, "steps=-1"),
        ({"dynamics": bl.GradientDescent(lambda t: 0.1 if t < 3 else 0.05)}, "schedules must be arithmetic in t"),
    ],
)
def test_what_cannot_be_compiled_is_refused(changes, message):
    with pytest.raises(bl.BilevelError, match=message):
        compiled(ridge(), torch.zeros(4), **changes)


def test_piecewise_quadratics_are_refused_before_anything_is_traced(traced_only):
    problem = bl.Problem(
        inner=lambda w, lam, b: torch.nn.functional.huber_loss(b[0] @ w, b[1], delta=10.0) + (lam.exp() * w**2).sum(),
        outer=lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean(),
        init=lambda lam: torch.zeros(4),
    )
    with pytest.raises(bl.BilevelError, match="quadratic in w, but `huber_loss`"):
        compiled(problem, torch.zeros(4), dynamics=bl.GradientDescent(0.3), method=bl.Spectral())
    assert not traced_only
