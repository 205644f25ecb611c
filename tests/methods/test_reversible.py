"""Reversible: the run is undone to the bit, at a fraction of a bit per weight and step."""

import math

import pytest
import torch

import bilevel as bl
from bilevel.engine.process import Process
from bilevel.methods.reversible import ErasedDigits, ExactMomentum, Ratio
from bilevel.testing import relative_error


def network(width=16):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, 3))
    w, apply = bl.functional(model)
    x, y = torch.randn(20, 8), torch.arange(20) % 3
    cross_entropy = torch.nn.functional.cross_entropy
    problem = bl.Problem(
        inner=lambda w, lam, b: (
            cross_entropy(apply(w, b[0]), b[1]) + sum(lam[k].exp() * (v**2).sum() for k, v in w.items())
        ),
        outer=lambda w, lam, b: cross_entropy(apply(w, b[0]), b[1]),
        init=lambda lam: w,
    )
    return problem, {k: torch.tensor(-5.0) for k in w}, bl.Task((x, y), (x.flip(0), y))


@pytest.mark.parametrize("momentum", [0.9, 0.5, 0.99, 1.0, 1 / 3, math.sqrt(0.5), 0.123456])
def test_a_run_is_undone_to_the_bit(momentum):
    problem, lam, task = network()
    process = Process(problem, lam, task, bl.HeavyBall(0.1, momentum), 200)
    with torch.no_grad():
        w, v = process.bound.start()
        exact = ExactMomentum(process.bound, w, v, 47, 1)
        trail = []
        for t in process.times:
            trail.append(([x.clone() for x in exact.w], [x.clone() for x in exact.v]))
            exact.forward(t)
        for t in reversed(process.times):
            exact.backward(t)
            before_w, before_v = trail.pop()
            assert all(torch.equal(a, b) for a, b in zip(exact.w + exact.v, before_w + before_v, strict=True)), (
                f"step {t}"
            )
    assert all(int(erased.digits.abs().sum()) == 0 and not erased.full for erased in exact.erased)


@pytest.mark.parametrize("momentum", [0.9, math.sqrt(0.7), 0.301])
def test_multiplying_and_dividing_are_inverse_and_keep_what_they_must(momentum):
    ratio = Ratio(momentum)
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(-(2**50), 2**50, (1000,), generator=generator)
    values, erased = start.clone(), ErasedDigits(torch.zeros_like(start))
    push = [torch.randint(-(2**48), 2**48, (1000,), generator=generator) for _ in range(500)]
    for t, p in enumerate(push):
        multiplied = ratio.stretch(erased.multiply(values, ratio, t))
        assert float((multiplied.double() - momentum * values.double()).abs().max()) < 200
        values = multiplied + p
    bits = 8 * erased.nbytes() / (1000 * 500)
    assert bits < math.log2(1 / momentum) * 1.3 + 64 * 2 / 500
    for t, p in reversed(list(enumerate(push))):
        values = erased.divide(ratio.shrink(values - p), ratio, t)
    assert torch.equal(values, start)


def test_memory_is_a_fraction_of_a_bit_per_weight_and_step():
    problem, lam, task = network()
    settings = {"dynamics": bl.HeavyBall(0.05, 0.9), "steps": 700}
    reversible = bl.hypergradient(problem, lam, task, method=bl.Reversible(), **settings)
    reverse = bl.hypergradient(problem, lam, task, method=bl.Reverse(group_bytes=0), **settings)
    assert relative_error(reversible.grad, reverse.grad) < 1e-8
    assert reversible.stats.peak_memory < reverse.stats.peak_memory / 20
    numbers = sum(v.numel() for v in problem.init(lam).values())
    kept = reversible.stats.peak_memory - 2 * 8 * numbers
    assert 8 * kept / (numbers * 700) < 0.25


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e5])
def test_numbers_of_any_size(size):
    target = size * torch.tensor([1.0, 0.5])
    problem = bl.Problem(
        lambda w, lam, _: ((w - target) ** 2).sum() * lam.exp() / 2,
        lambda w, lam, _: (w**2).sum(),
        lambda lam: torch.zeros(2),
    )
    settings = {"dynamics": bl.HeavyBall(0.02, 0.5), "steps": 200}
    found = bl.hypergradient(problem, torch.zeros(()), bl.Task(None, None), method=bl.Reversible(), **settings)
    expected = bl.hypergradient(problem, torch.zeros(()), bl.Task(None, None), **settings)
    assert relative_error(found.grad, expected.grad) < 1e-10 and relative_error(found.inner, expected.inner) < 1e-10


def test_divergence_names_the_step_and_the_loss():
    problem = bl.Problem(
        lambda w, lam, _: (lam * w**2).sum(), lambda w, lam, _: (w**2).sum(), lambda lam: torch.ones(2)
    )
    with pytest.raises(bl.DivergenceError) as caught:
        bl.hypergradient(
            problem,
            torch.ones(2),
            bl.Task(None, None),
            dynamics=bl.HeavyBall(2.5, 0.9),
            steps=500,
            method=bl.Reversible(),
        )
    assert caught.value.step and caught.value.loss and f"step {caught.value.step}" in str(caught.value)


def test_a_momentum_that_vanishes_on_the_way_is_refused():
    problem, lam, task = network()
    dynamics = bl.HeavyBall(0.1, lambda t: 0.0 if t == 5 else 0.9)
    with pytest.raises(bl.BilevelError, match="at step 5"):
        bl.hypergradient(problem, lam, task, dynamics=dynamics, steps=10, method=bl.Reversible())


def test_an_empty_leaf_and_a_start_at_rest():
    """No number says how large a unit should be: neither may fail, in either default precision."""
    torch.set_default_dtype(torch.float32)
    problem = bl.Problem(
        inner=lambda w, lam, batch: 0.5 * lam * (w["a"] ** 2).sum() + w["b"].sum(),
        outer=lambda w, lam, batch: (w["a"] - lam).square().sum(),
        init=lambda lam: {"a": torch.zeros(2), "b": torch.zeros(0)},
    )
    settings = {"dynamics": bl.HeavyBall(0.1, 0.5), "steps": 3, "method": bl.Reversible()}
    assert bl.hypergradient(problem, torch.tensor(1.0), bl.Task(None, None), **settings).grad == 4
