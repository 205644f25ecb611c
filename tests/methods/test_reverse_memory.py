"""`Reverse(memory=…)`: the plan, the steps it runs and the iterates it keeps, against the theory of checkpointing."""

import functools
import math
import weakref

import pytest
import torch

import bilevel as bl
from bilevel.engine import replay
from bilevel.engine.replay import Sizes, as_bytes, backwards, runs
from bilevel.testing import relative_error

SIZE = 300


@functools.cache
def fewest(count, kept):
    """The optimal number of runs, by trying every place for the next kept state."""
    if count <= 1:
        return 0
    if kept == 1:
        return count * (count - 1) // 2
    return min(m + fewest(count - m, kept - 1) + fewest(m, kept) for m in range(1, count))


@pytest.mark.parametrize("kept", [1, 2, 3, 4, 7, 40])
@pytest.mark.parametrize("count", [1, 2, 3, 10, 31, 40])
def test_the_schedule_is_optimal_and_keeps_no_more_than_it_may(count, kept):
    ran, most = 0, 0

    def advance(state, first, last):
        nonlocal ran
        assert state == first
        ran += last - first
        return last

    order = []
    for index, state, held in backwards(count, kept, 0, advance):
        assert index == state
        order.append(index)
        most = max(most, held)
    assert order == list(reversed(range(count)))
    assert ran == runs(count, kept) == fewest(count, min(kept, count))
    assert most <= kept + 1


@pytest.mark.parametrize(("count", "kept"), [(100_000, 17), (100_000, 40), (10_000, 9)])
def test_logarithmically_many_states_are_enough_for_very_long_runs(count, kept):
    r = replay.repetitions(count, kept)
    assert math.comb(kept + r, kept) >= count > math.comb(kept + r - 1, kept)
    assert runs(count, kept) <= r * count and r <= 8


class Watched(bl.GradientDescent):
    """Counts its steps, and the iterates of steps without a graph that are in memory at a time."""

    runs, most, alive = 0, 0, weakref.WeakSet()

    def step(self, loss, w, state, t):
        after, state = super().step(loss, w, state, t)
        Watched.runs += 1
        if not torch.is_grad_enabled():
            Watched.alive.add(after)
            Watched.most = max(Watched.most, len(Watched.alive))
        return after, state


def problem():
    return bl.Problem(
        inner=lambda w, lam, b: (torch.log(torch.cosh(w - b)) + 0.5 * lam.exp() * w**2).sum(),
        outer=lambda w, lam, b: ((w - 1) ** 2).sum(),
        init=lambda lam: torch.zeros(SIZE, dtype=lam.dtype),
    )


def arguments():
    generator = torch.Generator().manual_seed(0)
    lam = 0.3 * torch.randn(SIZE, generator=generator, dtype=torch.float64)
    return problem(), lam, bl.Task(torch.randn(SIZE, generator=generator, dtype=torch.float64), None)


@pytest.mark.parametrize(
    ("memory", "kind"),
    [
        ("1GB", "all iterates"),
        (1_600_000, "all iterates"),
        (1_200_000, "balanced groups"),
        (800_000, "balanced groups"),
        (260_000, "binomial"),
        (160_000, "binomial"),
    ],
)
def test_every_plan_gives_the_gradient_of_reverse_and_says_what_it_does(memory, kind):
    args, settings = arguments(), {"dynamics": Watched(0.2), "steps": 256}
    expected = bl.hypergradient(*args, method=bl.Reverse(), **settings)
    method = bl.Reverse(memory=memory, group_bytes=0)
    bl.hypergradient(*args, method=method, **settings)
    Watched.runs = Watched.most = 0
    found = bl.hypergradient(*args, method=method, **settings)
    plan = found.stats.plan
    assert plan.kind == kind, str(plan)
    assert relative_error(found.grad, expected.grad) < 1e-10
    assert float(found.value) == float(expected.value)
    assert Watched.runs == found.stats.steps + 256
    assert found.stats.steps == plan.steps if kind != "binomial" else found.stats.steps <= plan.steps
    # If groups are of equal size, this is the number of the theory.
    assert 256 % plan.group or found.stats.steps == plan.group * runs(256 // plan.group, plan.kept)
    assert found.stats.peak_memory <= plan.memory <= as_bytes(memory)
    # The start is no result of a step. Two more are in memory while a step is run: the one before and the one after.
    assert plan.kept - 1 <= Watched.most <= plan.kept + 2


def test_less_memory_means_more_steps():
    args, settings = arguments(), {"dynamics": bl.HeavyBall(0.2, 0.5), "steps": 256}
    steps = [
        bl.hypergradient(*args, method=bl.Reverse(memory=memory), **settings).stats.steps
        for memory in ("1GB", 300_000, 220_000, 190_000)
    ]
    assert steps == sorted(steps) and steps[0] <= 256 < steps[-1] < 256 * 20


def test_too_little_memory_names_the_least_that_works():
    args, settings = arguments(), {"dynamics": bl.GradientDescent(0.2), "steps": 50}
    with pytest.raises(bl.BilevelError, match="the least that works here is") as error:
        bl.hypergradient(*args, method=bl.Reverse(memory=1000), **settings)
    least = int(str(error.value).split("least that works here is ")[1].split(" bytes")[0].replace(",", ""))
    with pytest.raises(bl.BilevelError, match="least"):
        bl.hypergradient(*args, method=bl.Reverse(memory=least - 1), **settings)
    with pytest.warns(bl.BilevelWarning, match="runs 1,225 steps for T = 50"):
        found = bl.hypergradient(*args, method=bl.Reverse(memory=least), **settings)
    assert found.stats.plan.kept == 1 and found.stats.steps == 50 * 49 // 2
    expected = bl.hypergradient(*args, method=bl.Reverse(), **settings)
    assert relative_error(found.grad, expected.grad) < 1e-10


@pytest.mark.parametrize("memory", [0, -1, "much", "3 iB", 1.5, True])
def test_what_is_no_amount_of_memory_is_refused(memory):
    with pytest.raises(bl.BilevelError, match="not an amount of memory"):
        bl.hypergradient(*arguments(), dynamics=bl.GradientDescent(0.2), steps=3, method=bl.Reverse(memory=memory))


def test_two_plans_at_once_are_refused():
    with pytest.raises(bl.BilevelError, match="two plans"):
        bl.hypergradient(
            *arguments(), dynamics=bl.GradientDescent(0.2), steps=3, method=bl.Reverse("sqrt", memory="1GB")
        )


def test_units():
    assert [as_bytes(m) for m in ("1b", "3 kB", "2MiB", "1.5g", 7)] == [1, 3000, 2 * 1024**2, 1_500_000_000, 7]


def test_a_hundred_thousand_steps_need_few_iterates():
    # A network of ten million weights in float32. Recording and differentiating one of its steps takes 400 MB.
    sizes = Sizes(steps=100_000, state=40_000_000, graph=85_000_000, fixed=400_000_000)
    plan = sizes.plan(2_000_000_000, 1)
    assert plan.kind == "binomial" and plan.memory <= 2_000_000_000
    assert (plan.kept, plan.group) == (11, 1) and plan.steps < 8 * 100_000
    # No other size of groups would run fewer steps.
    for group in range(1, 12):
        kept = sizes.room(group, 2_000_000_000)
        assert kept < 1 or plan.steps <= group * runs(math.ceil(100_000 / group), kept)


def test_the_workspace_of_a_step_is_what_its_tensors_take():
    from bilevel.engine.recorded import allocated

    def call():
        a = torch.ones(1000, dtype=torch.float64)
        b = a.view(10, 100) + 1  # 16,000 bytes
        del a
        return (b.exp() * 2).sum()  # b, its exponential, and twice that

    assert allocated(call) in range(24_000, 24_100)
    x = torch.ones(1000, dtype=torch.float64, requires_grad=True)
    # x², the factor for its derivative and the gradient are alive in the backward pass.
    assert allocated(lambda: torch.autograd.grad((x**2).sum(), x)) >= 16_000
