"""Steps that compute one part of w from another: averages of weights, alternating updates, consensus, tied copies.

A method that records several steps in one graph must still take ∇_w L with the parts of w as separate variables. The
reference runs the steps in plain torch with first derivatives only, and takes central differences.
"""

from dataclasses import dataclass

import pytest
import torch
from comparing import EXACT, agree, differences

import bilevel as bl
from bilevel import trees

LAM = torch.tensor([0.3, -0.2], dtype=torch.float64)


def loss(w, lam, data=None):
    a, b = w["a"], w["b"]
    return (a - 1).square().sum() + 3 * (b + a.sin() - 2).square().sum() + (lam * a).sum() + (lam.exp() * b**2).sum()


def judge(w, lam, data=None):
    return (w["a"] ** 2).sum() + w["b"].sum() ** 2


def start(lam):
    return {"a": torch.zeros(2), "b": torch.ones(2)}


def descend(inner, w, rate=0.05):
    return trees.map(lambda x, g: x - rate * g, w, bl.gradient(inner, w))


def averaged(inner, w, state, t):
    """b is the running average of the weights a, as a target network is."""
    moved = descend(inner, w)
    return {"a": moved["a"], "b": 0.7 * w["b"] + 0.3 * moved["a"]}, state


def alternating(inner, w, state, t):
    """First a, then b at the new a (Gauss and Seidel)."""
    moved = {"a": descend(inner, w)["a"], "b": w["b"]}
    return {"a": moved["a"], "b": descend(inner, moved)["b"]}, state


def consensus(inner, w, state, t):
    """Both parts become their mean."""
    moved = descend(inner, w)
    mean = (moved["a"] + moved["b"]) / 2
    return {"a": mean, "b": mean}, state


def by_hand(inner, w, state, t):
    """The gradient by torch itself instead of `bilevel.gradient`."""
    a, b = torch.autograd.grad(inner(w), (w["a"], w["b"]), create_graph=True)
    moved = w["a"] - 0.05 * a
    return {"a": moved, "b": w["b"] - 0.05 * b + 0.1 * moved}, state


def slow_and_fast(inner, w, state, t):
    """Slow weights follow fast ones, and the fast ones are pulled to where the slow ones now are."""
    fast = descend(inner, w)["a"]
    slow = w["b"] + 0.5 * (fast - w["b"])
    return {"a": 0.5 * (fast + slow), "b": slow}, state


@dataclass(frozen=True)
class Averaging(bl.GradientDescent):
    """Gradient descent with an average: a subclass of a dynamics whose parts do not meet."""

    def step(self, loss, w, state, t):
        return averaged(loss, w, state, t)


@dataclass(frozen=True)
class Equal(bl.Penalty):
    """0 where a = b and infinite elsewhere."""

    def value(self, w, t=1):
        return torch.zeros(())

    def prox(self, w, step, t=1):
        mean = (w["a"] + w["b"]) / 2
        return {"a": mean, "b": mean}


CASES = {
    "an average of the weights": (averaged, averaged),
    "alternating updates": (alternating, alternating),
    "consensus": (consensus, consensus),
    "a gradient by hand": (by_hand, by_hand),
    "slow and fast weights": (slow_and_fast, slow_and_fast),
    "a subclass of gradient descent": (Averaging(0.05), averaged),
    "a penalty that makes parts equal": (bl.ISTA(0.05, Equal()), consensus),
}


@pytest.mark.parametrize("name", CASES)
def test_parts_of_w_that_meet_in_a_step(name):
    dynamics, step = CASES[name]

    def plain(lam):
        w = start(lam)
        for t in range(1, 7):
            live = trees.map(lambda leaf: leaf.detach().clone().requires_grad_(), w)
            w = trees.detach(step(lambda w: loss(w, lam), live, (), t)[0])
        return judge(w, lam)

    agree(differences(plain, LAM), bl.Problem(loss, judge, start), LAM, dynamics=dynamics, steps=6)


def test_a_step_that_returns_lam_itself():
    """w is reset to λ in every third step, and the inner objective uses λ as well."""
    inner = lambda w, lam, data: ((w - 1) ** 2 + lam * w**2).sum()  # noqa: E731

    def reset(lam):
        def step(loss, w, state, t):
            return (lam if t % 3 == 0 else w - 0.1 * bl.gradient(loss, w)), state

        return bl.StepFunction(step)

    def plain(lam):
        w = torch.zeros(2)
        for t in range(1, 6):
            w = lam if t % 3 == 0 else w - 0.1 * (2 * (w - 1) + 2 * lam * w)
        return (w**3).sum()

    problem = bl.Problem(inner, lambda w, lam, data: (w**3).sum(), lambda lam: torch.zeros(2))
    agree(differences(plain, LAM), problem, LAM, methods=EXACT, dynamics=reset, steps=5)
