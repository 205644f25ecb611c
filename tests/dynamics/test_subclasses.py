"""A subclass that changes a step or the start of a dynamics is no longer what its base class declares."""

from dataclasses import dataclass

import pytest
import torch

import bilevel as bl

X, Y = torch.linspace(-1, 1, 48).reshape(12, 4).sin(), torch.linspace(-1, 1, 12).cos()
TASK, LAM = bl.Task((X, Y), (X + 0.1, Y)), torch.zeros(4)


def error(w, lam, batch):
    return ((batch[0] @ w - batch[1]) ** 2).mean()


PROBLEM = bl.Problem(lambda w, lam, b: error(w, lam, b) + (lam.exp() * w**2).sum(), error, torch.ones_like)


@dataclass(frozen=True)
class Shrinking(bl.GradientDescent):
    def step(self, loss, w, state, t):
        w, state = super().step(loss, w, state, t)
        return 0.9 * w, state


@dataclass(frozen=True)
class Pushed(bl.HeavyBall):
    def init(self, w):
        return torch.ones_like(w)


@dataclass(frozen=True)
class Annealed(bl.GradientDescent):
    """It declares its form, which depends on t although no setting does."""

    def step(self, loss, w, state, t):
        return w - self.lr / t * bl.gradient(loss, w), state

    def heavy_ball_form(self, t):
        return self.lr / t, 0.0


@dataclass(frozen=True)
class Bounded(bl.ISTA):
    def step(self, loss, w, state, t):
        w, state = super().step(loss, w, state, t)
        return w.clamp(min=0.05), state


@pytest.mark.parametrize("dynamics", [Shrinking(0.1), Pushed(0.1, 0.5), Annealed(0.1)], ids=lambda d: type(d).__name__)
def test_methods_for_a_known_step_do_not_take_another_one(dynamics):
    right = bl.hypergradient(PROBLEM, LAM, TASK, dynamics=dynamics, steps=30, method=bl.Unrolled())
    chosen = bl.hypergradient(PROBLEM, LAM, TASK, dynamics=dynamics, steps=30, method="auto")
    torch.testing.assert_close(chosen.grad, right.grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(chosen.value, right.value, rtol=1e-10, atol=0)
    for method in (bl.Spectral(), bl.Reversible()):
        with pytest.raises(bl.BilevelError, match=r"not (Shrinking|Pushed)|do not change with t|a momentum in"):
            bl.hypergradient(PROBLEM, LAM, TASK, dynamics=dynamics, steps=30, method=method)


def test_implicit_does_not_differentiate_the_fixed_point_of_another_step():
    with pytest.raises(bl.BilevelError, match="and Bounded does not follow"):
        bl.hypergradient(PROBLEM, LAM, TASK, dynamics=Bounded(0.1, bl.L1(0.05)), steps=400, method=bl.Implicit())


def test_a_subclass_that_changes_no_step_is_what_its_base_class_is():
    @dataclass(frozen=True)
    class Named(bl.GradientDescent):
        name: str = "mine"

    plain, named = (
        bl.hypergradient(PROBLEM, LAM, TASK, dynamics=kind(0.1), steps=30, method=bl.Spectral())
        for kind in (bl.GradientDescent, Named)
    )
    assert torch.equal(plain.grad, named.grad)
