"""Broken dynamics: the public battery rejects each and says what is wrong.

Every mutant is a part that passes its battery (`test_batteries.py`) with one thing changed.
"""

import itertools

import pytest
import torch

import bilevel as bl
from bilevel import trees
from bilevel.dynamics import adam
from bilevel.dynamics.base import gradient, update, zeros_like
from bilevel.testing import check_dynamics
from testing.mutants import rejected


def dynamics_of(function, start=None):
    return bl.StepFunction(function, start) if start else bl.StepFunction(function)


def in_place(loss, w, state, t):
    for leaf, slope in zip(trees.leaves(w), trees.leaves(gradient(loss, w)), strict=True):
        leaf.data.sub_(0.2 * slope.detach())
    return trees.map(torch.clone, w), state


def with_hidden_state():
    count = itertools.count(1)
    return lambda loss, w, state, t: (update(lambda w, g: w - 0.3 / next(count) * g, w, gradient(loss, w)), state)


def with_global_randomness(loss, w, state, t):
    return update(lambda w, g: w - 0.2 * torch.rand(()) * g, w, gradient(loss, w)), state


def with_a_detached_gradient(loss, w, state, t):
    return update(lambda w, g: w - 0.2 * g.detach(), w, gradient(loss, w)), state


def with_a_detached_velocity(loss, w, state, t):
    velocity = update(lambda v, g: 0.9 * v.detach() - 0.1 * g, state, gradient(loss, w))
    return trees.add(w, velocity), velocity


def that_rounds(loss, w, state, t):
    return update(lambda w, g: (w - 0.2 * g).float(), w, gradient(loss, w)), state


def that_drops_a_leaf(loss, w, state, t):
    return {"a": w["a"] - 0.2 * gradient(loss, w)["a"]}, state


def that_looks_whether_it_is_recorded(loss, w, state, t):
    lr = 0.2 if any(leaf.grad_fn is not None for leaf in trees.leaves(w)) else 0.1
    return update(lambda w, g: w - lr * g, w, gradient(loss, w)), state


def that_decays(loss, w, state, t):
    """Decay, which moves the limit away from ∇L = 0 without a word."""
    return update(lambda w, g: w - 0.2 * (g + 0.5 * w), w, gradient(loss, w)), state


class WithAWrongForm(bl.HeavyBall):
    def heavy_ball_form(self, t):
        return self.lr, 0.5 * self.momentum


class WithAHalfLearnedStepSize(bl.GradientDescent):
    """Half of the step size's derivative is lost."""

    def step(self, loss, w, state, t):
        lr = torch.as_tensor(self.lr)
        return update(lambda w, g: w - 0.5 * (lr + lr.detach()) * g, w, gradient(loss, w)), state

    def heavy_ball_form(self, t):
        return None


class WithAFrozenStepSize(bl.GradientDescent):
    def step(self, loss, w, state, t):
        return update(lambda w, g: w - torch.as_tensor(self.lr).detach() * g, w, gradient(loss, w)), state

    def heavy_ball_form(self, t):
        return None


class WithAWrongDecay(bl.TorchOptim):
    def slope_decay(self, t):
        return 0.1


class WithAWrongStationaryStep(bl.ISTA):
    """The penalty is missing from it."""

    def stationary_step(self, loss, w, t):
        return update(lambda w, g: w - 0.1 * g, w, gradient(loss, w))


class KeepsAGraph(bl.GradientDescent):
    def step(self, loss, w, state, t):
        with torch.enable_grad():
            live = trees.map(lambda leaf: leaf if leaf.requires_grad else leaf.detach().requires_grad_(), w)
            return update(lambda w, g: w - self.lr * g, live, gradient(loss, live)), state


def named(value):
    return getattr(value, "function", type(value)).__name__


DYNAMICS = [
    (dynamics_of(in_place), "in place"),
    (dynamics_of(with_hidden_state()), "two calls of step 1 .* differ"),
    (dynamics_of(with_global_randomness), "two calls of step 1 .* differ"),
    (dynamics_of(with_a_detached_gradient), r"no hypergradient: λ\['penalty'\] reaches neither"),
    (dynamics_of(with_a_detached_velocity, zeros_like), "quadratic problem.*central differences"),
    (dynamics_of(that_rounds), "dtype of w"),
    (dynamics_of(that_drops_a_leaf), "structure"),
    (dynamics_of(that_looks_whether_it_is_recorded), "central differences|differs from Unrolled"),
    (dynamics_of(that_decays), "point where ∇L is not zero"),
    (WithAWrongForm(0.2, 0.6), "Spectral|heavy_ball_form"),
    (WithAHalfLearnedStepSize(0.2), r"lr learned.*λ\['setting'\].*0\.5 times"),
    (WithAFrozenStepSize(0.2), "lr learned.*no hypergradient"),
    (WithAWrongStationaryStep(0.3, bl.L1(0.05)), "not a fixed point of its stationary_step"),
    (WithAWrongDecay(torch.optim.SGD, lr=0.2, weight_decay=0.5), r"point where ∇L \+ 0\.1·w is not zero"),
    (KeepsAGraph(0.2), "keeps a graph"),
]


@pytest.mark.parametrize(
    ("mutant", "match"), DYNAMICS, ids=lambda value: getattr(value, "function", type(value)).__name__
)
def test_a_broken_dynamics(mutant, match):
    rejected(check_dynamics, mutant, match)


def test_a_square_root_with_an_infinite_slope(monkeypatch):
    monkeypatch.setattr(adam, "root", torch.sqrt)
    rejected(check_dynamics, bl.Adam(0.1), "weights have no gradient.*square root")
