"""What the methods keep and how often they run things, counted."""

import gc

import pytest
import torch

import bilevel as bl
from bilevel.engine.process import Process
from bilevel.methods import reverse
from bilevel.testing import relative_error

ALONE = bl.Reverse(group_bytes=0)


def counted(steps_seen):
    problem = bl.Problem(
        inner=lambda w, lam, b: (steps_seen.append(1), (lam * w**2).sum())[1],
        outer=lambda w, lam, b: (w**2).sum(),
        init=lambda lam: torch.ones(50),
    )
    return problem, torch.full((50,), 0.4), bl.Task(None, None)


@pytest.mark.parametrize(
    ("method", "calls"),
    [
        (bl.Unrolled(), 100),
        (ALONE, 199),
        (bl.Reverse("sqrt", group_bytes=0), 279),
        (bl.Truncated(10, group_bytes=0), 109),
        (bl.Forward(), 100),
        (bl.Reversible(), 301),
    ],
    ids=lambda v: str(v),
)
def test_evaluations_of_the_inner_objective(method, calls):
    seen = []
    problem, lam, task = counted(seen)
    settings = {"dynamics": bl.HeavyBall(0.3, 0.5), "steps": 100, "method": method}
    bl.hypergradient(problem, lam, task, **settings)
    seen.clear()
    bl.hypergradient(problem, lam, task, **settings)
    # The second call of a loop pays for nothing but the work itself: the checks are remembered.
    assert len(seen) == calls


def test_small_steps_are_recorded_together_within_a_few_megabytes():
    seen = []
    problem, lam, task = counted(seen)
    settings = {"dynamics": bl.HeavyBall(0.3, 0.5), "method": bl.Reverse()}
    for steps, calls in ((100, 100), (1000, 2000)):
        bl.hypergradient(problem, lam, task, steps=steps, **settings)
        seen.clear()
        found = bl.hypergradient(problem, lam, task, steps=steps, **settings)
        assert len(seen) <= calls
        assert found.stats.peak_memory <= reverse.GROUP_BYTES
        expected = bl.hypergradient(
            problem, lam, task, dynamics=settings["dynamics"], steps=steps, method=bl.Unrolled()
        )
        assert relative_error(found.grad, expected.grad) < 1e-10


def test_checkpoints_keep_few_iterates():
    problem, lam, task = counted([])
    state = 2 * 50 * 8
    kept = {
        c: bl.hypergradient(
            problem, lam, task, dynamics=bl.HeavyBall(0.3, 0.5), steps=400, method=bl.Reverse(c, group_bytes=0)
        ).stats.peak_memory
        / state
        for c in (None, 4, "sqrt")
    }
    assert kept[None] == 400 and kept[4] <= 4 + 100 and kept["sqrt"] <= 41


@pytest.mark.parametrize("size", [50, 20_000])
def test_sqrt_balances_iterates_against_recorded_steps_and_runs_each_step_twice(size):
    seen = []
    problem = bl.Problem(
        inner=lambda w, lam, b: (seen.append(1), (lam * w**2 + torch.cos(b * w)).sum())[1],
        outer=lambda w, lam, b: (w**2).sum(),
        init=lambda lam: torch.ones(size),
    )
    lam, task, steps = torch.full((size,), 0.4), bl.Task(torch.linspace(0, 1, size), None), 100
    settings = {"dynamics": bl.HeavyBall(0.1, 0.5), "steps": steps}
    unrolled = bl.hypergradient(problem, lam, task, method=bl.Unrolled(), **settings)
    # One byte is less than any step, so that nothing is recorded together for the sake of speed alone.
    found = bl.hypergradient(problem, lam, task, method=bl.Reverse("sqrt", group_bytes=1), **settings)
    seen.clear()
    bl.hypergradient(problem, lam, task, method=bl.Reverse("sqrt", group_bytes=1), **settings)
    assert steps < len(seen) < 2 * steps
    assert found.stats.steps + found.stats.replayed == len(seen)
    assert relative_error(found.grad, unrolled.grad) < 1e-10
    iterate, graph = 2 * size * 8, unrolled.stats.peak_memory / steps
    least = 2 * (steps * iterate * (graph + reverse.NODE_BYTES)) ** 0.5
    assert 0.5 * iterate * steps**0.5 < found.stats.peak_memory <= 1.05 * least


def test_what_is_said_to_be_kept_are_the_tensors_that_the_recorded_steps_keep():
    problem, lam, task = counted([])
    bytes_kept = {}

    def keep(tensor):
        # The storage itself is kept too, so that no other tensor can have its address.
        bytes_kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    settings = {"dynamics": bl.HeavyBall(0.3, 0.5), "steps": 40, "method": bl.Unrolled()}
    said = bl.hypergradient(problem, lam, task, **settings).stats.peak_memory
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        bl.hypergradient(problem, lam, task, **settings)
    assert said == pytest.approx(sum(storage.nbytes() for storage in bytes_kept.values()), rel=0.1)


def test_forward_keeps_nothing_that_grows_with_t():
    problem, lam, task = counted([])
    sizes = {
        T: bl.hypergradient(
            problem, lam, task, dynamics=bl.HeavyBall(0.3, 0.5), steps=T, method=bl.Forward()
        ).stats.peak_memory
        for T in (10, 100)
    }
    assert sizes[10] == sizes[100] == 50 * 2 * 50 * 8


def test_auto_says_why_and_is_exact(caplog):
    caplog.set_level("INFO", "bilevel")
    problem, lam, task = counted([])
    settings = {"dynamics": bl.GradientDescent(0.1), "steps": 60}
    found = bl.hypergradient(problem, lam, task, method="auto", **settings)
    assert found.stats.method == "Spectral" and caplog.messages == [found.stats.reason]
    bl.hypergradient(problem, lam, task, method="auto", **settings)
    assert len(caplog.messages) == 1, "the reason is logged when it changes, not in every hyperiteration"
    assert (
        relative_error(found.grad, bl.hypergradient(problem, lam, task, method=bl.Reverse(), **settings).grad) < 1e-10
    )
    with_adam = bl.hypergradient(problem, lam, task, method="auto", dynamics=bl.Adam(0.1), steps=60)
    assert with_adam.stats.method == "Unrolled"


def test_auto_turns_to_thrift_when_memory_is_short():
    from bilevel.methods.auto import choose

    problem, lam, task = counted([])
    process = lambda lam, steps: Process(problem, lam, task, bl.Adam(0.1), steps)  # noqa: E731
    assert type(choose(process(lam, 100), budget=130_000)[0]) is bl.Reverse
    assert choose(process(lam, 100), budget=10_000)[0] == bl.Reverse("sqrt")
    assert choose(process(lam, 1000), budget=200_000)[0] == bl.Reverse(memory=200_000)
    scalar = bl.Problem(lambda w, lam, b: (lam * w**2).sum(), problem.outer, problem.init)
    assert type(choose(Process(scalar, torch.tensor(0.4), task, bl.Adam(0.1), 100), budget=10_000)[0]) is bl.Forward


@pytest.mark.parametrize(
    "method",
    [
        bl.Unrolled(),
        bl.Reverse(),
        bl.Reverse("sqrt"),
        bl.Truncated(3),
        bl.Forward(),
        bl.Reversible(),
        bl.Spectral(),
        bl.Implicit(),
        bl.FirstOrder(),
        "auto",
    ],
    ids=str,
)
def test_nothing_waits_for_the_garbage_collector(method):
    """What a call recorded is freed when it returns; in a cycle it would stay until Python happens to collect."""
    problem = bl.Problem(
        inner=lambda w, lam, b: (b * w**2).sum(),
        outer=lambda w, lam, b: (w**2 + lam**2).sum(),
        init=lambda lam: torch.ones(5),
        encode=lambda lam, task: bl.Task(lam.exp(), task.val),
    )
    settings = {"dynamics": bl.HeavyBall(0.1, 0.5), "steps": 20, "method": method}
    bl.hypergradient(problem, torch.zeros(5), bl.Task(None, None), **settings)
    gc.collect()
    gc.disable()
    try:
        bl.hypergradient(problem, torch.zeros(5), bl.Task(None, None), **settings)
        assert not [thing for thing in gc.get_objects() if type(thing) is Process]
    finally:
        gc.enable()
