"""Proximal maps minimise what they are defined to minimise."""

from dataclasses import dataclass

import pytest
import torch

import bilevel as bl
from bilevel.hypergradients import value_of
from bilevel.testing import central_differences, relative_error
from bilevel.testing.problems import examples

PENALTIES = [
    bl.L1(0.7),
    bl.L1(torch.tensor([0.1, 2.0, 0.5, 0.0])),
    bl.GroupL2(0.9, (0, 0, 1, 1)),
    bl.GroupL2(torch.tensor([5.0, 0.2]), (0, 1, 1, 0)),
    bl.Indicator(bl.Box(-0.3, 0.4)),
    bl.Indicator(bl.NonNegative()),
    bl.Indicator(bl.Ball(0.5)),
]


@pytest.mark.parametrize("penalty", PENALTIES, ids=lambda p: type(p).__name__)
def test_the_prox_is_the_minimiser(penalty):
    generator = torch.Generator().manual_seed(0)
    x, step = torch.randn(4, generator=generator), 0.6
    best = penalty.prox(x, step)

    def objective(u):
        return 0.5 * ((u - x) ** 2).sum() + step * penalty.value(u)

    for _ in range(300):
        other = best + 0.1 * torch.randn(4, generator=generator)
        assert objective(best) <= objective(other)


def test_a_constraint_with_a_learned_bound():
    """min ½‖w − x‖² with 0 ≤ w ≤ λ has w = clamp(x, 0, λ), and ∂E/∂λ counts the weights at the bound."""
    x = torch.tensor([-1.0, 0.5, 2.0, 3.0])
    problem = bl.Problem(
        lambda w, lam, b: 0.5 * ((w - b) ** 2).sum(), lambda w, lam, b: w.sum(), lambda lam: torch.zeros(4)
    )
    settings = {"dynamics": lambda lam: bl.ISTA(0.5, bl.Indicator(bl.Box(0.0, lam))), "steps": 80}
    for method in (bl.Unrolled(), bl.Reverse(), bl.Forward(), bl.Implicit()):
        found = bl.hypergradient(problem, torch.tensor(1.2), bl.Task(x, x), method=method, **settings)
        torch.testing.assert_close(found.inner, torch.tensor([0.0, 0.5, 1.2, 1.2]))
        assert float(found.grad) == pytest.approx(2.0, rel=1e-9)
    outside = bl.Indicator(bl.Simplex()).value(torch.tensor([0.5, 0.6])), bl.Indicator(bl.Box(0, 1)).value(x)
    assert all(torch.isinf(value) for value in outside)
    assert float(bl.Indicator(bl.Simplex()).value(bl.Simplex().project(x))) == 0


def test_strengths_may_depend_on_t_and_on_lam():
    example = examples()[1]
    settings = {
        "dynamics": lambda lam: bl.FISTA(lambda t: 0.3 / t**0.5, bl.L1(lambda t: 0.02 * (lam["shift"] ** 2 + 1) / t)),
        "steps": 6,
    }
    expected = central_differences(lambda lam: value_of(example.problem, lam, example.task, **settings), example.lam)
    found = bl.hypergradient(example.problem, example.lam, example.task, **settings).grad
    assert relative_error(found, expected) < 1e-6


def test_group_penalties_are_differentiable_and_switch_groups_off():
    x, y = torch.randn(20, 4, generator=torch.Generator().manual_seed(1)), torch.zeros(20)
    y = x[:, 0] + 0.5 * x[:, 1]
    problem = bl.Problem(
        lambda w, lam, b: 0.5 * ((b[0] @ w - b[1]) ** 2).mean(),
        lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean(),
        lambda lam: torch.zeros(4),
    )
    settings = {"dynamics": lambda lam: bl.ISTA(0.3, bl.GroupL2(lam.exp(), (0, 0, 1, 1))), "steps": 60}
    lam, task = torch.tensor([-3.0, -1.0]), bl.Task((x, y), (x, y))
    found = bl.hypergradient(problem, lam, task, **settings)
    assert bool((found.inner[2:] == 0).all()) and bool((found.inner[:2] != 0).all())
    expected = central_differences(lambda lam: value_of(problem, lam, task, **settings), lam)
    assert relative_error(found.grad, expected) < 1e-6


@pytest.mark.parametrize("penalty", [bl.L1, lambda s: bl.GroupL2(s, (0, 1))], ids=["L1", "GroupL2"])
def test_a_strength_of_zero_gives_the_identity_and_its_derivative(penalty):
    strength, x = torch.tensor([0.0, 1.0], requires_grad=True), torch.tensor([0.0, 2.0], requires_grad=True)
    found = penalty(strength).prox(x, 0.5)
    torch.testing.assert_close(found, torch.tensor([0.0, 1.5]))
    in_x, in_strength = torch.autograd.grad(found.sum(), (x, strength))
    assert in_x.tolist() == [1.0, 1.0] and in_strength.tolist() == [0.0, -0.5]


def test_a_prox_keeps_what_is_not_a_number():
    assert bool(bl.L1(1.0).prox(torch.tensor([torch.nan]), 0.5).isnan().all())


def test_the_slope_in_a_strength_of_zero_is_that_from_above():
    strength, x = torch.zeros((), requires_grad=True), torch.tensor([-2.0, 0.0, 2.0])
    found = bl.L1(strength).prox(x, 0.5)
    assert torch.autograd.grad(found @ torch.tensor([1.0, 1.0, 3.0]), strength)[0] == 0.5 - 1.5


@dataclass(frozen=True)
class Twice(bl.L1):
    def value(self, w, t=1):
        return 2 * super().value(w, t)

    def prox(self, w, step, t=1):
        return super().prox(w, 2 * step, t)


@dataclass(frozen=True)
class Wider(bl.Box):
    def project(self, lam):
        return lam.clamp(self.low - 1, self.high + 1)


def test_a_subclass_has_no_duality_gap_of_its_base_class():
    problem = bl.Problem(
        lambda w, lam, _: ((w - lam) ** 2).sum(), lambda w, lam, _: (w**2).sum(), lambda lam: torch.zeros(3)
    )
    for penalty, missing in ((Twice(0.1), "no dual norm"), (bl.Indicator(Wider(-0.1, 0.1)), "no support function")):
        until = bl.Until(bl.FISTA(0.3, penalty), gap=1e-9)
        with pytest.raises(bl.BilevelError, match=missing):
            bl.hypergradient(problem, torch.ones(3), bl.Task(None, None), dynamics=until, steps=100)
        assert bl.hypergradient(problem, torch.ones(3), bl.Task(None, None), dynamics=until.dynamics, steps=100)
