"""Compiled Spectral: the numbers of the eager one, also after what the objectives read has changed."""

import gc
import math
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import bilevel as bl
from bilevel import trees
from bilevel.hypergradients import value_of
from bilevel.methods import compiled as compiled_blocks
from bilevel.methods import spectral_compiled
from bilevel.methods.kernels import Kernel, _broadcast_product, compile_function
from bilevel.testing import central_differences, relative_error

FACTOR = 1.0


def data(width=None):
    generator = torch.Generator().manual_seed(3)
    shape = (9,) if width is None else (9, width)
    x, y = torch.randn(9, 4, generator=generator), torch.randn(*shape, generator=generator)
    return bl.Task((x, y), (x + 0.5, y))


def ridge(penalty, init=lambda lam: torch.full((4,), 0.2)):
    return bl.Problem(
        inner=lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean() + penalty(w, lam),
        outer=lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean(),
        init=init,
    )


def ask(problem, lam, task=None, *, compiled=True, dynamics=None, steps=30, **more):
    method = compiled if isinstance(compiled, bl.Method) else bl.Spectral(compiled=True) if compiled else bl.Unrolled()
    dynamics = dynamics or bl.GradientDescent(0.05)
    return bl.hypergradient(problem, lam, task or data(), dynamics=dynamics, steps=steps, method=method, **more).grad


@pytest.fixture
def traced_only(monkeypatch):
    """Trace and do not compile: all that matters for what is baked in, in a hundredth of the time."""
    calls = []

    def trace(function, inputs, instead):
        calls.append(function)
        traced = make_fx(function)(*(x.detach().clone() for x in inputs))
        return Kernel(lambda args: traced(*args))

    monkeypatch.setattr(spectral_compiled, "compile_function", trace)
    monkeypatch.setattr(compiled_blocks, "compile_function", trace)
    return calls


class Holder:
    factor = 1.0
    frozen = False

    def penalty(self, w, lam):
        return self.factor * (lam.exp() * w**2).sum()


@pytest.mark.parametrize("kind", ["closure", "global", "attribute", "tensor rebound", "tensor in place"])
def test_objectives_that_read_changed_state(traced_only, monkeypatch, kind):
    cell, holder, tensor = 1.0, Holder(), torch.tensor(1.0)
    penalty = {
        "closure": lambda w, lam: cell * (lam.exp() * w**2).sum(),
        "global": lambda w, lam: FACTOR * (lam.exp() * w**2).sum(),
        "attribute": holder.penalty,
    }.get(kind, lambda w, lam: tensor * (lam.exp() * w**2).sum())
    problem, lam = ridge(penalty), torch.linspace(-1, 0.5, 4)
    before = ask(problem, lam)
    assert relative_error(before, ask(problem, lam, compiled=False)) < 1e-10
    ask(problem, lam + 1)
    assert len(traced_only) == 1
    cell = holder.factor = 3.0
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    if kind == "tensor in place":
        tensor.fill_(3.0)
    else:
        tensor = torch.tensor(3.0)
    after = ask(problem, lam)
    assert relative_error(after, ask(problem, lam, compiled=False)) < 1e-10
    assert relative_error(after, before) > 0.1
    # A tensor is an input of the code; everything else is compiled anew, once.
    assert len(traced_only) == (1 if kind == "tensor in place" else 2)


def test_a_switch_that_changes_derivatives_only_is_seen_in_a_closure(traced_only):
    frozen = False
    problem = bl.Problem(
        inner=lambda w, lam, b: (
            ((b[0] @ w - b[1]) ** 2).mean() + ((lam.detach() if frozen else lam).exp() * w**2).sum()
        ),
        outer=lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean() + lam.sum(),
        init=lambda lam: torch.zeros(4),
    )
    lam = torch.linspace(-1, 0.5, 4)
    assert relative_error(ask(problem, lam), ask(problem, lam, compiled=False)) < 1e-10
    frozen = True
    assert torch.equal(ask(problem, lam), torch.ones(4))


def test_the_same_tensors_in_another_order(traced_only):
    """An objective may take batches of two kinds, whose tensors have the same shapes."""
    problem = bl.Problem(
        inner=lambda w, lam, b: ((w - b[0]) ** 2).sum() + (lam.exp() * w**2).sum() + 0 * b[1].sum(),
        outer=lambda w, lam, b: ((w - b[0]) ** 2).sum(),
        init=lambda lam: torch.zeros(4),
    )
    one, two, lam = torch.ones(4), torch.full((4,), 5.0), torch.zeros(4)
    for batch in ([one, two], [one, two], {1: one, 0: two}, {0: one, 1: two}, (two, one)):
        task = bl.Task(batch, batch)
        assert relative_error(ask(problem, lam, task), ask(problem, lam, task, compiled=False)) < 1e-10


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
    for factor in (1.0, 1.0, 3.0, 0.5):
        task = bl.Task(Batch(torch.ones(4), factor), Batch(torch.full((4,), 0.8), factor))
        found, expected = (ask(problem, torch.zeros(4), task, compiled=c) for c in (True, False))
        assert relative_error(found, expected) < 1e-10
    assert len(traced_only) == 3


def test_an_objective_that_is_no_function_is_refused(traced_only):
    class Counter:
        calls = 0

        def penalty(self, w, lam):
            self.calls += 1
            return self.calls * (lam.exp() * w**2).sum()

    with pytest.raises(bl.BilevelError, match="not a pure function"):
        ask(ridge(Counter().penalty), torch.zeros(4))


def test_other_starts_settings_and_data_need_no_new_code(traced_only):
    begin = torch.full((4,), 0.2)
    problem, lam = ridge(lambda w, lam: (lam.exp() * w**2).sum(), lambda lam: begin), torch.zeros(4)
    ask(problem, lam)
    begin = torch.full((4,), -3.0)
    x, y = data().train
    for changes in (
        {"start": torch.ones(4)},
        {"dynamics": bl.GradientDescent(0.02)},
        {"task": bl.Task((-x, y), (x, y))},
    ):
        assert relative_error(ask(problem, lam, **changes), ask(problem, lam, compiled=False, **changes)) < 1e-10
    assert len(traced_only) == 1


@pytest.mark.parametrize("steps", [30, 600])
def test_learned_starts_and_settings(traced_only, steps):
    problem = ridge(lambda w, lam: (lam["d"].exp() * w**2).sum(), lambda lam: lam["w"].tanh())
    lam = {"d": torch.linspace(-1, 0.5, 4), "w": torch.ones(4), "lr": torch.tensor(-5.0), "m": torch.tensor(0.2)}
    for dynamics in (
        lambda lam: bl.HeavyBall(lam["lr"].exp(), lam["m"].sigmoid()),
        lambda lam: bl.GradientDescent(lam["lr"].exp() + 0 * lam["m"]),
    ):
        found = ask(problem, lam, dynamics=dynamics, steps=steps)
        assert relative_error(found, ask(problem, lam, compiled=False, dynamics=dynamics, steps=steps)) < 1e-10
        if steps == 30:
            truth = central_differences(
                lambda lam, d=dynamics: value_of(problem, lam, data(), dynamics=d, steps=30), lam
            )
            assert relative_error(found, truth) < 1e-6


def test_a_value_that_vanishes_at_the_end_is_no_alarm(traced_only):
    """At w_T the objective is rounding alone, which compiled code need not share."""
    holder = Holder()
    holder.factor = 0.0
    x = torch.eye(4)
    task = bl.Task((x, x[0]), (x, x[0]))
    problem = bl.Problem(
        inner=lambda w, lam, b: lam.exp() * ((b[0] @ w - b[1]) ** 2).sum() + holder.penalty(w, lam),
        outer=lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).sum(),
        init=lambda lam: torch.full((4,), 0.3),
    )
    lam = torch.tensor(0.0)
    for _ in range(2):
        found = ask(problem, lam, task, dynamics=bl.GradientDescent(0.25), steps=200)
        assert float(found.abs()) < 1e-12
    assert len(traced_only) == 1


@pytest.mark.parametrize("method", [bl.Spectral(compiled=True), bl.Reverse(compiled=5)], ids=lambda m: type(m).__name__)
class TestBothCompiledMethods:
    def check(self, problem, lam, method, task=None, **more):
        found = ask(problem, lam, task, compiled=method, **more)
        fresh = bl.Problem(problem.inner, problem.outer, problem.init)
        assert relative_error(found, ask(fresh, lam, task, compiled=False, **more)) < 1e-10

    def test_the_order_of_keys(self, traced_only, method):
        def inner(w, lam, b):
            (x, y), (one, two) = b.values(), lam.values()
            return ((x @ w["w"] - y) ** 2).mean() + one.exp() * (w["w"] ** 2).sum() + two * w["w"].sum()

        x, y = torch.randn(4, 4), torch.randn(4, 4)
        problem = bl.Problem(inner, lambda w, lam, b: ((w["w"] - 1) ** 2).sum(), lambda lam: {"w": torch.zeros(4, 4)})
        a, b = torch.tensor(0.1), torch.tensor(-0.4)
        for lam in ({"a": a, "b": b}, {"b": b, "a": a}):
            for batch in ({"x": x, "y": y}, {"y": y, "x": x}):
                for _ in range(2):
                    self.check(problem, lam, method, bl.Task(batch, None))

    def test_the_order_of_keys_of_w(self, traced_only, method):
        turned = False
        problem = bl.Problem(
            lambda w, lam, b: sum(k * ((v - lam.sum()) ** 2).sum() for k, v in enumerate(w.values(), 1)),
            lambda w, lam, b: (w["a"] ** 2).sum() + 3 * (w["b"] ** 2).sum(),
            lambda lam: dict(sorted({"a": torch.zeros(2), "b": torch.zeros(2)}.items(), reverse=turned)),
        )
        for turned in (False, True, True, False):  # noqa: B007 - init reads it
            self.check(problem, torch.ones(2), method, bl.Task(None, None))

    def test_layouts_and_surroundings(self, traced_only, method):
        problem, lam = ridge(lambda w, lam: (lam.exp() * w**2).sum() * torch.ones(()).to(w)), torch.zeros(4)
        ask(problem, lam, compiled=method)
        count = len(traced_only)
        with torch.autocast("cpu", torch.bfloat16):
            ask(problem, lam, compiled=method)
        assert len(traced_only) == 2 * count
        x, y = data().train
        try:
            self.check(problem, lam, method, bl.Task((x.to_sparse(), y), (x, y)))
        except bl.BilevelError as error:
            assert "compile" in str(error)
        except (RuntimeError, NotImplementedError):
            assert len(traced_only) > 2 * count, "run by the code of dense tensors"

    def test_a_number_in_the_closure(self, traced_only, method):
        factor = 1.0
        problem, lam = ridge(lambda w, lam: factor * (lam.exp() * w**2).sum()), torch.zeros(4)
        for factor in (1.0, 3.0, 3.0):  # noqa: B007 - the penalty reads it
            self.check(problem, lam, method)
            count = len(traced_only)
        self.check(problem, lam, method)
        assert len(traced_only) == count

    def test_a_step_size_in_a_closure(self, traced_only, method):
        rate, problem = 0.05, ridge(lambda w, lam: (lam.exp() * w**2).sum())
        kinds = [lambda lam: bl.GradientDescent(rate), bl.GradientDescent(lambda t: rate + 0 * t)]
        for rate in (0.05, 0.02):  # noqa: B007 - the dynamics read it
            for dynamics in kinds:
                self.check(problem, torch.zeros(4), method, dynamics=dynamics)

    def test_what_is_compiled_dies_with_the_problem(self, traced_only, method):
        class Model:
            factor = 1.0

            def __init__(self):
                self.problem = ridge(lambda w, lam: self.factor * (lam.exp() * w**2).sum())

        model = Model()
        ask(model.problem, torch.zeros(4), compiled=method)
        gone = weakref.ref(model)
        del model
        traced_only.clear()
        gc.collect()
        assert gone() is None

    def test_threads_compile_once(self, traced_only, method):
        problem, lam = ridge(lambda w, lam: (lam.exp() * w**2).sum()), torch.zeros(4)
        expected = ask(problem, lam, compiled=False)
        gate = threading.Barrier(4)

        def run(_):
            torch.set_default_dtype(torch.float64)
            gate.wait()
            return ask(problem, lam, compiled=method)

        with ThreadPoolExecutor(4) as pool:
            for found in pool.map(run, range(4)):
                assert relative_error(found, expected) < 1e-10
        assert len(traced_only) == (1 if isinstance(method, bl.Spectral) else 2)


def test_negated_views_and_other_captured_tensors():
    """Four calls of compiled code, of which one is compiled anew."""
    scale = torch.ones(4)
    z = torch.tensor(1 + 2j, dtype=torch.complex128)
    problem = bl.Problem(
        inner=lambda w, lam, b: ((w - b) ** 2).sum() + (scale * lam.exp() * w**2).sum(),
        outer=lambda w, lam, b: ((w - 2 * b) ** 2).sum(),
        init=lambda lam: torch.zeros(4),
    )
    for number in (z.imag, z.conj().imag, z.conj().imag):
        task = bl.Task(number, number)
        found = ask(problem, torch.zeros(4), task)
        assert relative_error(found, ask(problem, torch.zeros(4), task, compiled=False)) < 1e-10
    scale.data = torch.full((4,), 3.0, dtype=torch.float32)
    found = ask(problem, torch.zeros(4), task)
    assert relative_error(found, ask(problem, torch.zeros(4), task, compiled=False)) < 1e-10


def test_compiled_code_reads_small_tensors_anew_and_takes_updates_in_place():
    """With columns, so that batches of products with one matrix occur; two calls of real compiled code."""
    scale = torch.tensor(1.0)

    def penalty(w, lam):
        total = torch.zeros(4)
        total += scale * lam.exp() * (w**2).sum(1)
        return total.sum()

    problem, lam = ridge(penalty, lambda lam: torch.zeros(4, 2)), torch.linspace(-1, 0.5, 4)
    for value in (1.0, 2.0):
        scale.fill_(value)
        found = ask(problem, lam, data(2))
        assert relative_error(found, ask(problem, lam, data(2), compiled=False)) < 1e-10


@pytest.mark.parametrize("look", [lambda x: x.item(), lambda x: x.tolist(), lambda x: float(x.detach().numpy())])
def test_numbers_are_never_baked_in(look):
    with pytest.raises(bl.BilevelError, match="numbers in tensors are not known"):
        compile_function(lambda x: [x * look(x)], [torch.tensor(2.0)], "something else")


@pytest.mark.parametrize("look", [float, bool, lambda x: math.exp(x), lambda x: x[None][0].item()])
def test_numbers_of_captured_tensors_are_never_baked_in(look):
    captured = torch.tensor(2.0)
    with pytest.raises(bl.BilevelError, match="numbers in tensors are not known"):
        compile_function(lambda x: [x * look(captured)], [torch.tensor(2.0)], "something else")


@pytest.mark.parametrize(
    "draw", [torch.rand_like, torch.nn.functional.dropout, torch.bernoulli], ids=lambda f: f.__name__
)
def test_random_numbers_are_never_compiled(draw):
    def function(x):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return [x * draw(x)]

    with pytest.raises(bl.BilevelError, match="draws random numbers"):
        compile_function(function, [torch.tensor(0.5)], "something else")


def test_products_with_one_matrix():
    generator = torch.Generator().manual_seed(1)
    one, many = torch.randn(3, 4, generator=generator), torch.randn(5, 4, 2, generator=generator)
    assert torch.allclose(_broadcast_product(one.expand(5, 3, 4), many), one @ many)
    assert torch.allclose(_broadcast_product(many.mT, one.T.expand(5, 4, 3)), many.mT @ one.T)
    assert _broadcast_product(one.repeat(5, 1, 1), many) is NotImplemented


class TestTheShortWay:
    """A call like an earlier one skips the checks and gives what the long way gives."""

    @pytest.fixture
    def only_the_short_way(self, traced_only, monkeypatch):
        problem, lam = ridge(lambda w, lam: (lam.exp() * w**2).sum()), torch.linspace(-1, 0.5, 4)
        ask(problem, lam)

        def long_way(*_):
            raise AssertionError("the long way")

        monkeypatch.setattr("bilevel.hypergradients.check_arguments", long_way)
        return problem, lam

    def test_what_it_serves(self, only_the_short_way, monkeypatch):
        problem, lam = only_the_short_way
        task, other = data(), data()
        task.train[0].mul_(2.0)
        other.val[1].requires_grad_()
        cases = [
            {"lam": lam + 1.0},
            {"lam": lam, "task": task},
            {"lam": lam.clone().requires_grad_(), "task": other},
            {"lam": lam, "dynamics": bl.GradientDescent(0.01)},
        ]
        found = [ask(problem, **case) for case in cases]
        monkeypatch.undo()
        for grad, case in zip(found, cases, strict=True):
            assert not grad.requires_grad
            assert relative_error(grad, ask(problem, compiled=False, **case)) < 1e-10

    def test_what_it_leaves_to_the_long_way(self, only_the_short_way):
        problem, lam = only_the_short_way
        x, y = data().train
        for changes in (
            {"steps": 31},
            {"steps": True},
            {"lam": [lam]},
            {"lam": lam.float()},
            {"lam": lam * math.nan},
            {"task": bl.Task((x[:5], y[:5]), (x, y))},
            {"task": bl.Task((x * math.inf, y), (x, y))},
            {"dynamics": bl.HeavyBall(0.05, 0.5)},
            {"dynamics": lambda lam: bl.GradientDescent(0.05)},
            {"dynamics": bl.GradientDescent(lambda t: 0.05)},
            {"start": torch.zeros(4)},
            {"allow_unused": True},
            {"dynamics": bl.GradientDescent(1e9), "steps": 30},
        ):
            with pytest.raises(AssertionError, match="the long way"):
                ask(problem, **{"lam": lam, **changes})
        with torch.inference_mode(), pytest.raises(AssertionError, match="the long way"):
            ask(problem, lam)

    def test_an_init_that_changes(self, traced_only):
        begin = torch.full((4,), 0.2)
        problem = ridge(lambda w, lam: (lam.exp() * w**2).sum(), lambda lam: begin + 0 if follow else begin * lam.sum())
        lam = torch.linspace(-1, 0.5, 4)
        for follow in (True, True, False, True):  # noqa: B007 - init reads it
            begin = begin + 1
            assert relative_error(ask(problem, lam), ask(problem, lam, compiled=False)) < 1e-10

    def test_an_objective_that_is_quadratic_in_places(self, traced_only):
        problem = bl.Problem(
            inner=lambda w, lam, b: (
                torch.nn.functional.huber_loss(b[0] @ w, b[1], delta=10.0) + (lam.exp() * w**2).sum()
            ),
            outer=lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean(),
            init=lambda lam: torch.zeros(4),
        )
        (x, y), lam = data().train, torch.zeros(4)
        for task in (bl.Task((x, y), (x, y)), bl.Task((x, 9 * y), (x, y))):
            with pytest.raises(bl.BilevelError, match="quadratic in w, but `huber_loss`"):
                ask(problem, lam, task, dynamics=bl.GradientDescent(0.3))
        assert not traced_only

    def test_its_costs_are_told(self, traced_only):
        problem, lam = ridge(lambda w, lam: (lam.exp() * w**2).sum()), torch.zeros(4)
        settings = {"dynamics": bl.GradientDescent(0.05), "steps": 30, "method": bl.Spectral(compiled=True)}
        first, second = (bl.hypergradient(problem, lam, data(), **settings) for _ in range(2))
        assert second.stats == type(second.stats)(**{**vars(first.stats), "seconds": second.stats.seconds})
        assert 0 < second.stats.seconds < first.stats.seconds
        assert torch.equal(first.inner, second.inner) and second.t == first.t and second.state is None
