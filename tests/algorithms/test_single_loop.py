"""Stochastic single-loop algorithms: unbiased directions, variance reduction, step sizes, and refusals."""

from dataclasses import dataclass, replace
from functools import partial
from types import MethodType, SimpleNamespace
from typing import ClassVar

import pytest
import torch

import bilevel as bl
from bilevel import algorithms, trees
from bilevel.algorithms.single_loop import Move
from bilevel.algorithms.step_sizes import neumann_terms
from bilevel.engine.oracles import Triple
from bilevel.testing.single_loop import FiniteSum, can_enumerate, check_single_loop, check_unbiased
from tracing import traced

LAM = {"x": torch.ones(2, dtype=torch.float64)}
FIXED = {"inner_lr": 0.2, "outer_lr": 0.1}


def single_loops():
    return {name: cls for name, cls in algorithms.find().items() if cls.moves_w}


def distance(data, lam):
    return float((lam["x"] - data.solution).norm() / data.solution.norm())


def run(algorithm, data=None, task=None, **settings):
    data = data or FiniteSum.drawn(8, 0.1)
    settings = {"iterations": 5, "progress": False, **settings}
    return bl.solve(data.problem, LAM, task or data.task, algorithm=algorithm, **settings)


def test_the_folder_holds_what_the_literature_uses():
    assert set(single_loops()) >= {"SOBA", "SABA", "StocBiO", "AmIGO", "TTSA", "SUSTAIN", "MRBO", "SRBA", "BOME"}


@pytest.mark.parametrize("name", [name for name, cls in single_loops().items() if cls.unbiased])
def test_one_example_of_each_is_enumerated(name):
    assert any(can_enumerate(example) for example in single_loops()[name].examples())


@pytest.mark.parametrize("reduced", [bl.SABA, bl.SRBA])
def test_variance_reduction_reaches_1e_8_where_plain_sampling_stalls(reduced):
    data, far = FiniteSum.drawn(8, 0.1), []
    run(bl.SOBA(**FIXED), data, iterations=400, callbacks=[lambda here: far.append(distance(data, here.lam))])
    assert min(far[200:]) > 1e-4 and sum(far[200:]) / 200 > 1e-2
    found = run(reduced(**FIXED), data, iterations=400)
    assert distance(data, found.outer) < 1e-8
    assert found.history["gradient_norm"][-1] < 1e-7


def test_tolerance_ends_a_run_that_reduces_variance():
    found = run(bl.SABA(**FIXED), iterations=2000, tol=1e-6)
    assert found.outcome.kind == "converged" and len(found.history["value"]) < 1000


@pytest.mark.parametrize("kind", [bl.SABA, bl.SRBA])
def test_tolerance_ends_a_run_at_the_edge_of_a_constraint(kind):
    data, box = FiniteSum.drawn(8, 0.1), bl.Box(-0.2, 0.2)
    assert not torch.allclose(box.project(data.solution), data.solution)
    found = run(kind(**FIXED), data, constraint=box, iterations=1000, tol=1e-6)
    assert found.outcome.kind == "converged" and float(found.outer["x"].abs().max()) == pytest.approx(0.2)


def test_soba_on_whole_batches_is_a_loop_written_by_hand():
    data = FiniteSum.drawn(3, 0.3)
    A, C, b = (x.mean(0) for x in data.train)
    F, G, c, e = (x.mean(0) for x in data.val)
    w, v, lam = torch.zeros(3).double(), torch.zeros(3).double(), LAM["x"]
    for _ in range(7):
        dw, dv, dlam = A @ w + C.T @ lam + b, A @ v + F @ w + c, C @ v + G @ lam + e
        w, v, lam = w - 0.2 * dw, v - 0.2 * dv, lam - 0.1 * dlam
    found = run(bl.SOBA(**FIXED), data, bl.Task(data.train, data.val), iterations=7)
    assert torch.allclose(found.outer["x"], lam, rtol=1e-12)


def test_bome_is_a_loop_written_by_hand():
    data = FiniteSum.drawn(3, 0.3)
    A, C, b = (x.mean(0) for x in data.train)
    F, G, c, e = (x.mean(0) for x in data.val)
    w, lam = torch.zeros(3).double(), LAM["x"]
    for _ in range(7):
        z = w
        for _ in range(4):
            z = z - 0.2 * (A @ z + C.T @ lam + b)
        slope, gap = torch.cat([F @ w + c, G @ lam + e]), torch.cat([A @ w + C.T @ lam + b, C @ (w - z)])
        d = slope + max(0.0, 0.5 - float(slope @ gap / (gap @ gap))) * gap
        w, lam = w - 0.1 * d[:3], lam - 0.1 * d[3:]
    found = run(bl.BOME(inner_steps=4, **FIXED), data, bl.Task(data.train, data.val), iterations=7)
    assert torch.allclose(found.outer["x"], lam, rtol=1e-12)


def test_bome_is_off_by_the_order_of_its_step_size_and_biased_on_batches():
    data = FiniteSum.drawn(8, 0.1)
    whole, settings = bl.Task(data.train, data.val), {"inner_lr": 0.4, "inner_steps": 10}
    coarse, fine = (
        distance(data, run(bl.BOME(outer_lr=rate, **settings), data, whole, iterations=300).outer)
        for rate in (0.2, 0.04)
    )
    assert 3 < coarse / fine < 8 and fine < 0.01
    assert distance(data, run(bl.BOME(outer_lr=0.04, **settings), data, iterations=300).outer) > 3 * fine


def test_bome_moves_lam_far_where_f_is_flat_in_it():
    """One step size for both levels would be bound by the curvature in w, 1e4 times that in λ."""
    problem = bl.Problem(
        inner=lambda w, lam, x: ((w - 0.01 * lam) ** 2).sum(),
        outer=lambda w, lam, x: ((w - 1) ** 2).sum() + 1e-4 * (lam**2).sum(),
        init=torch.zeros_like,
    )
    found = bl.solve(problem, torch.zeros(3).double(), bl.Task(None, None), algorithm=bl.BOME(), iterations=100)
    assert torch.allclose(found.outer, torch.full((3,), 50.0).double(), rtol=0.1)


def test_bome_takes_first_derivatives_only():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            ctx.save_for_backward(w)
            return w**2

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, g):
            return g * 2 * ctx.saved_tensors[0]

    target = torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64)
    problem = bl.Problem(
        inner=lambda w, lam, x: Once.apply(w - lam).sum(),
        outer=lambda w, lam, x: ((w - target) ** 2).sum() + (lam**2).sum(),
        init=torch.zeros_like,
    )
    algorithm = bl.BOME(outer_lr=0.02)
    found = bl.solve(problem, torch.ones(3).double(), bl.Task(None, None), algorithm=algorithm, iterations=300)
    assert torch.allclose(found.outer, target / 2, atol=0.03)
    with pytest.raises(bl.BilevelError, match="SOBA differentiates implicitly"):
        bl.solve(problem, torch.ones(3).double(), bl.Task(None, None), algorithm=bl.SOBA(), iterations=1)


def test_schedules_are_functions_of_the_iteration():
    asked = []

    def lr(k):
        asked.append(k)
        return 0.1 / (1 + k)

    one = run(bl.SOBA(inner_lr=0.2, outer_lr=lr), iterations=4)
    assert set(asked) == {0, 1, 2, 3, 4}
    other = run(bl.SOBA(inner_lr=0.2, outer_lr=0.1), iterations=4)
    assert not torch.equal(one.outer["x"], other.outer["x"])


def test_leaves_of_w_and_of_lambda_may_have_any_shape():
    torch.manual_seed(0)
    data = torch.randn(32, 4, dtype=torch.float64)
    problem = bl.Problem(
        inner=lambda w, lam, x: ((w["a"].flatten() - lam[0] - x) ** 2).mean() + ((w["b"] - lam[1].sum()) ** 2).sum(),
        outer=lambda w, lam, x: ((w["a"].flatten() - x) ** 2).mean() + (w["b"] - 3) ** 2 + 0.1 * lam[1].square().sum(),
        init=lambda lam: {"a": torch.zeros(2, 2).double(), "b": torch.zeros(()).double()},
    )
    lam = (torch.zeros(4).double(), torch.zeros(1, 2).double())
    task = bl.Task(bl.FixedBatches(data, 8), bl.FixedBatches(data + 1, 8))
    found = bl.solve(problem, lam, task, algorithm=bl.SABA(), iterations=600)
    assert torch.allclose(found.outer[0], torch.ones(4).double(), atol=1e-6)
    # b = 2x is optimal where (2x − 3)² + 0.2x² is least: x = 12/8.4.
    assert torch.allclose(found.outer[1], torch.full((1, 2), 12 / 8.4).double(), atol=1e-6)


def test_a_function_of_k_is_a_source_of_batches():
    data = FiniteSum.drawn(8, 0.1)
    train, val = data.task.train, data.task.val
    found = run(bl.SOBA(**FIXED), data, lambda k: bl.Task(train(k + 1), val(k + 1)), iterations=6)
    assert torch.equal(found.outer["x"], run(bl.SOBA(**FIXED), data, iterations=6).outer["x"])


@pytest.mark.parametrize(
    "algorithm", [bl.SOBA(**FIXED), bl.SABA(**FIXED), bl.BOME(**FIXED)], ids=["SOBA", "SABA", "BOME"]
)
def test_a_batch_in_parts_is_the_batch(algorithm):
    data = FiniteSum.drawn(12, 0.1)
    whole = bl.Task(bl.FixedBatches(data.train, 6), bl.FixedBatches(data.val, 4))
    parts = bl.Task(bl.shards(whole.train, 3), bl.shards(whole.val, 2))
    one, two = (run(algorithm, data, task, iterations=6) for task in (whole, parts))
    assert torch.allclose(one.outer["x"], two.outer["x"], rtol=1e-12) and len(two.history["value"]) == 6
    assert one.history["value"] == pytest.approx(two.history["value"], rel=1e-12)
    with pytest.raises(bl.BilevelError, match="4 examples cannot be cut into 3 parts"):
        run(algorithm, data, bl.Task(whole.train, bl.shards(whole.val, 3)))
    with pytest.raises(bl.BilevelError, match="train is cut into shards"):
        run(None, data, bl.Task(parts.train, whole.val), dynamics=bl.GradientDescent(0.1), steps=1)


@dataclass(frozen=True)
class OneBatchForBoth(bl.TTSA):
    """The cross product on the batch that moved w: its mean is not the product of the means."""

    def step(self, at, point, memory, draw, rates):
        batch = draw.inner()
        w = point.w - rates.inner * at.gradient(point.w, point.lam, batch)
        value, outer_w, outer_lam = at.outer(w, point.lam, draw.outer())
        v = -rates.eta * outer_w
        lam = at.cross(w, point.lam, v, batch) + outer_lam
        return Move(value, Triple(w, v, lam), Triple(w, v, point.lam - rates.outer * lam), memory)


@dataclass(frozen=True)
class WrongSign(bl.SOBA):
    def step(self, at, point, memory, draw, rates):
        value, d = at.directions(point, draw.inner(), draw.outer())
        wrong = Triple(d.w, d.v, -d.lam)
        return Move(value, wrong, point.moved(wrong, rates.inner, rates.outer), memory)


@dataclass(frozen=True)
class Forgetful(bl.SABA):
    """Counts its iterations in a place that is not saved."""

    counts: ClassVar[dict[int, int]] = {}

    def step(self, at, point, memory, draw, rates):
        self.counts[id(at)] = self.counts.get(id(at), 0) + 1
        move = super().step(at, point, memory, draw, rates)
        return move._replace(point=replace(move.point, w=move.point.w * (1 - 1e-9 / self.counts[id(at)] ** 2)))


@pytest.mark.parametrize(
    ("check", "broken", "said"),
    [
        (check_unbiased, OneBatchForBoth(), "biased"),
        (check_single_loop, WrongSign(), "not minimise"),
        (check_single_loop, Forgetful(inner_lr=0.2, outer_lr=0.1), "saved state|biased"),
    ],
)
def test_the_battery_rejects(check, broken, said):
    with pytest.raises(AssertionError, match=said):
        check(broken)


def test_the_length_of_a_series():
    assert (1 - 0.25) ** neumann_terms(1.0, 4.0) <= 1e-3 < (1 - 0.25) ** (neumann_terms(1.0, 4.0) - 1)
    assert neumann_terms(0.0, 1.0) == 1000


def refused(algorithm, said, problem=None, task=None, error=bl.BilevelError, **settings):
    data = FiniteSum.drawn(4, 0.1)
    with pytest.raises(error, match=said):
        bl.solve(
            problem or data.problem, LAM, task or data.task, algorithm=algorithm, iterations=400,
            progress=False, raise_on_failure=True, **settings,
        )  # fmt: skip


def test_what_an_algorithm_lacks_is_said_before_work_begins():
    data = FiniteSum.drawn(4, 0.1)
    inner, outer, init = data.problem.inner, data.problem.outer, data.problem.init
    shuffled = bl.Task(bl.Minibatches(data.train, 1), bl.FixedBatches(data.val, 1))
    refused(bl.SABA(), r"train is Minibatches, which draws new.*FixedBatches", task=shuffled)
    refused(bl.SRBA(), r"task\.val is function", task=bl.Task(data.train, lambda k: data.val))
    saddle = bl.Problem(lambda w, lam, x: -(w**2).sum() + lam["x"].sum() * w.sum(), outer, init)
    refused(bl.SOBA(), "needs a convex inner problem", saddle)
    linear = bl.Problem(lambda w, lam, x: (w.sum() * lam["x"]).sum(), outer, init)
    refused(bl.SOBA(), "convex|does not depend on w", linear)
    only_init = bl.Problem(lambda w, lam, x: (w**2).sum(), lambda w, lam, x: (w**2).sum(), lambda lam: lam["x"] * 2)
    refused(bl.SOBA(), "SOBA differentiates implicitly", only_init)
    refused(bl.BOME(), "BOME compares inner solutions", only_init)
    refused(bl.AmIGO(), "Leave encode out", bl.Problem(inner, outer, init, encode=lambda lam, task: task))
    refused(bl.SOBA(), "takes inner steps of its own, so steps=3", steps=3)
    refused(bl.SOBA(), "would be random", tol=1e-3)
    refused(bl.SABA(), "would be random", patience=3)
    refused(bl.SOBA(), "updates one w", task=[data.task, data.task])
    refused(bl.SOBA(), "iterator", task=iter([data.task]))
    refused(bl.Descent(), r"pass dynamics=…", task=data.task)


def test_a_second_derivative_that_is_lost_is_noticed():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            ctx.save_for_backward(w)
            return w**2

        @staticmethod
        def backward(ctx, g):
            return g * 2 * ctx.saved_tensors[0].detach()

    data = FiniteSum.drawn(4, 0.1)
    hidden = bl.Problem(
        lambda w, lam, x: Cube.apply(w).sum() + lam["x"].sum() * w.sum(), data.problem.outer, data.problem.init
    )
    refused(bl.SOBA(), "derivative", hidden)


def test_samplers_that_are_biased_or_impure_are_noticed():
    data = FiniteSum.drawn(4, 0.1)
    refused(bl.SOBA(), r"task\.train is a biased sampler", task=bl.Task(lambda t: data.train, data.val))
    refused(bl.SOBA(), r"task\.val is a biased sampler", task=bl.Task(data.train, lambda k: data.val))
    noisy = bl.Task(data.train, lambda k: tuple(x + torch.randn(()) for x in data.val))
    refused(bl.SOBA(), "not a pure", task=noisy)
    inner = {"dynamics": bl.GradientDescent(0.1), "steps": 3}
    refused(None, r"task\.val is a biased sampler", task=bl.Task(data.train, lambda k: data.val), **inner)
    refused(None, r"task\.train is a biased sampler", task=bl.Task(lambda t: data.train, data.val), **inner)
    draws = SimpleNamespace(always=lambda self, t: data.train)
    for sampler in (partial(lambda batch, t: batch, data.train), MethodType(draws.always, draws)):
        refused(None, r"task\.train is a biased sampler", task=bl.Task(sampler, data.val), **inner)
    five = [tuple(x + k for x in data.val) for k in range(5)]
    assert len(run(None, data, bl.Task(data.train, lambda k: five[k - 1]), **inner).history["value"]) == 5
    whole = bl.Task(data.train, data.val)
    for source in (lambda k: whole, lambda k: [bl.Task(data.train, data.val)] * 2):
        refused(
            None, "tasks is a biased source: it gave the same data for k = 0, 1, 2, 4, 7 and 12", task=source, **inner
        )
    few = [bl.Task(tuple(x + k for x in data.train), data.val) for k in range(5)]
    assert len(run(None, data, few.__getitem__, **inner).history["value"]) == 5


def test_divergence_names_the_step_size_and_its_bound():
    refused(bl.SOBA(inner_lr=3.0, outer_lr=0.1), r"inner_lr = 3 lies above 2/ν = 1\.", error=bl.DivergenceError)
    refused(bl.SOBA(inner_lr=0.2, outer_lr=30.0), r"outer_lr = 30 lies above 0\.", error=bl.DivergenceError)
    data = FiniteSum.drawn(4, 0.1)
    found = run(bl.SOBA(inner_lr=3.0, outer_lr=0.1), data, iterations=2000)
    assert found.outcome.kind == "diverged" and bool(torch.isfinite(found.outer["x"]).all())


def test_divergence_is_noticed_before_numbers_overflow():
    for sizes, said in (((3.0, 0.1), "inner_lr = 3 lies above 2/ν = 1"), ((0.2, 30.0), "outer_lr = 30 lies above 0")):
        found = run(bl.SOBA(inner_lr=sizes[0], outer_lr=sizes[1]), iterations=40)
        assert found.outcome.kind == "diverged" and said in found.outcome and "have grown to" in found.outcome
        assert found.history["gradient_norm"].max() < 1e10


def test_settings_are_checked():
    for wrong in (
        lambda: bl.SOBA(inner_lr=-1.0),
        lambda: bl.AmIGO(inner_steps=0),
        lambda: bl.TTSA(terms=0),
        lambda: bl.MRBO(momentum=2.0),
        lambda: bl.SRBA(period=0),
        lambda: bl.BOME(barrier=0.0),
    ):
        with pytest.raises(bl.BilevelError):
            wrong()
    with pytest.raises(bl.BilevelError, match=r"does not divide 10 examples.*\[2, 5\]|\[1, 2, 5\]"):
        len(bl.FixedBatches(torch.arange(10), 3))


@pytest.mark.parametrize("algorithm", [bl.SABA(**FIXED), bl.MRBO(terms=2, **FIXED)], ids=["SABA", "MRBO"])
def test_a_run_resumes_from_its_checkpoint(algorithm, tmp_path):
    whole = run(algorithm, iterations=12)
    run(algorithm, iterations=7, checkpoint=tmp_path, checkpoint_every=3)
    resumed = run(algorithm, iterations=12, checkpoint=tmp_path, checkpoint_every=3)
    assert torch.equal(resumed.outer["x"], whole.outer["x"])
    assert resumed.history["value"].tolist() == whole.history["value"].tolist()


def test_checkpoints_of_other_settings_are_refused(tmp_path):
    run(bl.StocBiO(terms=2, **FIXED), iterations=4, checkpoint=tmp_path, checkpoint_every=2)
    with pytest.raises(bl.BilevelError, match=r"are those of another run.*terms=2.*terms=3"):
        run(bl.StocBiO(terms=3, **FIXED), iterations=8, checkpoint=tmp_path, checkpoint_every=2)


@pytest.mark.parametrize("part", ["inner", "outer"])
def test_checkpoints_of_another_problem_are_refused(part, tmp_path):
    problem = bl.Problem(
        lambda w, lam, x: ((w - lam * x) ** 2).mean(),
        lambda w, lam, x: ((w - x) ** 2).mean(),
        lambda lam: torch.zeros(2),
    )
    function = getattr(problem, part)
    other = replace(problem, **{part: lambda w, lam, x: 1.1 * function(w, lam, x)})
    given = torch.ones(2), bl.Task(torch.ones(4, 2), torch.full((4, 2), 2.0))
    call = {"algorithm": bl.SOBA(**FIXED), "iterations": 4, "checkpoint": tmp_path, "checkpoint_every": 2}
    bl.solve(problem, *given, **call)
    with pytest.raises(bl.BilevelError, match="are those of another run"):
        bl.solve(other, *given, **{**call, "iterations": 6})
    assert len(bl.solve(problem, *given, **{**call, "iterations": 6}).history["value"]) == 6


def test_compiled_derivatives_give_the_same_run(monkeypatch):
    """Traced, and not compiled by a C++ compiler: `test_compile.py` has that for functions of all kinds."""
    monkeypatch.setattr("bilevel.engine.oracles.compile_function", traced)
    eager, fast = (run(bl.SOBA(**FIXED, compiled=compiled), iterations=10) for compiled in (False, True))
    assert torch.allclose(eager.outer["x"], fast.outer["x"], rtol=1e-10)


def test_a_process_gathers_its_own_parts_of_a_batch_only():
    data = torch.arange(24.0).reshape(12, 2)
    sampler = bl.shards(bl.Minibatches(data, 8), 4)
    gathered, batch = [], sampler(3)
    make = batch.make
    lazy = replace(batch, make=lambda i: gathered.append(i) or make(i))
    assert torch.equal(lazy[2], bl.Minibatches(data, 8)(3)[4:6]) and gathered == [2]
    assert torch.equal(torch.cat(lazy.parts), bl.Minibatches(data, 8)(3))
    doubled = trees.map(lambda x: 2 * x, sampler(3))
    assert torch.equal(doubled[1], 2 * batch[1]) and trees.flatten(doubled)[1] == trees.flatten(sampler(4))[1]
