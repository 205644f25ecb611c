"""`check_problem` finds what is wrong with a user's problem."""

import pytest
import torch

import bilevel as bl
from bilevel import trees
from bilevel.testing import check_problem
from bilevel.testing.problems import examples

SETTINGS = {"dynamics": bl.GradientDescent(0.2), "steps": 5}


@pytest.mark.parametrize("example", examples(), ids=lambda e: e.name)
def test_a_sound_problem(example):
    report = check_problem(example.problem, example.lam, example.task, **SETTINGS)
    assert report.differences < (1e-3 if example.single else 1e-7)
    assert report.methods < (1e-6 if example.single else 1e-12)


def broken(**changes):
    example = examples()[1]
    base = example.problem
    return (
        bl.Problem(**{"inner": base.inner, "outer": base.outer, "init": base.init, **changes}),
        example.lam,
        example.task,
    )


def test_a_derivative_that_is_not_the_slope():
    base = examples()[1].problem
    half = lambda lam: {**lam, "penalty": 0.5 * lam["penalty"] + 0.5 * lam["penalty"].detach()}  # noqa: E731
    with pytest.raises(bl.BilevelError, match=r"by autograd and .* by differences"):
        check_problem(*broken(inner=lambda w, lam, b: base.inner(w, half(lam), b)), **SETTINGS)


def test_dropout_without_a_seed():
    base = examples()[1].problem
    with pytest.raises(bl.BilevelError, match="pure"):
        check_problem(*broken(outer=lambda w, lam, b: base.outer(w, lam, b) * (1 + 0.1 * torch.rand(()))), **SETTINGS)
    with pytest.raises(bl.BilevelError, match="pure"):
        check_problem(*broken(inner=lambda w, lam, b: base.inner(w, lam, b) * (1 + 0.1 * torch.rand(()))), **SETTINGS)


def test_an_unused_leaf():
    problem, lam, task = broken()
    with pytest.raises(bl.BilevelError, match=r"λ\['spare'\]"):
        check_problem(problem, {**lam, "spare": torch.ones(2)}, task, **SETTINGS)
    assert (
        check_problem(problem, {**lam, "spare": torch.ones(2)}, task, allow_unused=True, **SETTINGS).differences < 1e-6
    )


def test_values_that_are_not_finite():
    base = examples()[1].problem
    with pytest.raises(bl.DivergenceError):
        check_problem(*broken(inner=lambda w, lam, b: base.inner(w, lam, b) / 0), **SETTINGS)


def test_float32_is_allowed_three_digits():
    example = examples()[1]
    single = lambda tree: trees.map(lambda x: x.float(), tree)  # noqa: E731
    report = check_problem(
        example.problem, single(example.lam), bl.Task(single(example.task.train), single(example.task.val)), **SETTINGS
    )
    assert report.differences < 2e-2
