"""The compiled paths give the numbers of the eager ones."""

import pytest
import torch

import bilevel as bl
from bilevel.testing import relative_error
from bilevel.testing.problems import examples


def gradients(example, dynamics, steps, method):
    fast = bl.hypergradient(example.problem, example.lam, example.task, dynamics=dynamics, steps=steps, method=method)
    slow = bl.hypergradient(
        example.problem, example.lam, example.task, dynamics=dynamics, steps=steps, method=bl.Unrolled()
    )
    return fast, slow


@pytest.mark.parametrize(
    "dynamics",
    [lambda lam: bl.GradientDescent(0.1 + 0.01 * lam["shift"] ** 2), bl.Adam(lambda t: 0.1 / (1 + t))],
    ids=["learned step size", "scheduled Adam"],
)
def test_blocks_of_steps(dynamics):
    example = examples()[1]
    # 7 steps are three blocks of two and one eager step before them.
    fast, slow = gradients(example, dynamics, 7, bl.Reverse(compiled=2))
    assert relative_error(fast.grad, slow.grad) < 1e-10 and relative_error(fast.inner, slow.inner) < 1e-12


def test_minibatches_and_another_lam_reuse_the_code():
    example = examples()[2]
    dynamics = bl.HeavyBall(0.1, 0.5)
    fast, slow = gradients(example, dynamics, 6, bl.Reverse(compiled=2))
    assert relative_error(fast.grad, slow.grad) < 1e-10
    moved = {k: v + 0.3 for k, v in example.lam.items()}
    again = bl.hypergradient(
        example.problem, moved, example.task, dynamics=dynamics, steps=6, method=bl.Reverse(compiled=2)
    )
    expected = bl.hypergradient(example.problem, moved, example.task, dynamics=dynamics, steps=6)
    assert relative_error(again.grad, expected.grad) < 1e-10
    assert again.stats.seconds < 2, "compiled again instead of reused"


def test_spectral():
    example = examples()[0]
    fast, slow = gradients(example, bl.HeavyBall(0.2, 0.5), 40, bl.Spectral(compiled=True))
    assert relative_error(fast.grad, slow.grad) < 1e-10 and relative_error(fast.inner, slow.inner) < 1e-10
    assert torch.allclose(fast.value, slow.value, rtol=1e-10)
    x, y = example.task.train
    strided = bl.Task((x.T.contiguous().T, y), example.task.val)
    again = bl.hypergradient(
        example.problem,
        example.lam,
        strided,
        dynamics=bl.HeavyBall(0.2, 0.5),
        steps=40,
        method=bl.Spectral(compiled=True),
    )
    assert relative_error(again.grad, slow.grad) < 1e-10


def test_a_step_that_branches_on_t_is_refused():
    example = examples()[1]
    with pytest.raises(bl.BilevelError, match="schedules must be arithmetic in t"):
        gradients(example, bl.GradientDescent(lambda t: 0.1 if t < 3 else 0.05), 6, bl.Reverse(compiled=2))


def test_impossible_settings_are_refused():
    example = examples()[1]
    for method in (bl.Reverse(compiled=0), bl.Reverse("sqrt", compiled=2)):
        with pytest.raises(bl.BilevelError, match="compiled"):
            gradients(example, bl.GradientDescent(0.1), 6, method)
