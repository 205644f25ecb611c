"""The cases of the batteries, every example with every dynamics, and their reference gradients."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch

from bilevel import dynamics as all_dynamics
from bilevel import methods, trees
from bilevel.dynamics import Dynamics, DynamicsLike, as_function_of_lam
from bilevel.dynamics.gradient_descent import GradientDescent
from bilevel.dynamics.heavy_ball import HeavyBall
from bilevel.dynamics.ista import ISTA
from bilevel.dynamics.penalties import L1
from bilevel.engine.memory import memory_of
from bilevel.engine.method import Part
from bilevel.engine.process import Process
from bilevel.hypergradients import hypergradient, value_of
from bilevel.methods import Method
from bilevel.testing.differences import directions_in_each_leaf, slope_along
from bilevel.testing.problems import Example, examples, left_out
from bilevel.trees import Tree

# A prime number, so that checkpoint segments have different lengths.
STEPS = 7
# Enough for gradient descent on the examples, whose error falls by 0.74 a step, to reach 1e-12.
LIMIT = 100
EXACT = 1e-10
DIFFERENCES = 1e-6
# The relative error allowed between float32 and float64.
SINGLE = 1e-4


@dataclass(frozen=True, eq=False)
class BatteryCase:
    """An example and a dynamics, or a function of λ that returns one."""

    example: Example
    dynamics: DynamicsLike
    label: str

    def __str__(self) -> str:
        return f"{self.label} on the {self.example.name} problem"

    def process(self, steps: int) -> Process:
        """The process that `hypergradient` would build, with the same memory, so that checks are made once."""
        (problem, lam, task), _ = self.arguments(steps)
        return Process(problem, lam, task, self.dynamics, steps, memory=memory_of(problem))

    def arguments(self, steps: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for `hypergradient` and `value_of`."""
        example = self.example
        return (example.problem, example.lam, example.task), {"dynamics": self.dynamics, "steps": steps}

    def in_double(self) -> BatteryCase:
        return dataclasses.replace(self, example=self.example.to(torch.float64))

    @functools.cache  # noqa: B019 - pairs live as long as the process
    def visible(self, seen: frozenset[Part]) -> BatteryCase | None:
        """The case with those parts of λ only that enter at a place in `seen`; the others become constants."""
        example = self.example
        fixed = {key: value for key, value in example.lam.items() if not example.enters[key] & seen}
        kept = {key: value for key, value in example.lam.items() if key not in fixed}
        if not fixed or not kept:
            return self if kept else None

        def whole(lam: Tree) -> Tree:
            dtype = trees.leaves(lam)[0].dtype
            return {**trees.map(lambda leaf: leaf.to(dtype), fixed), **lam}

        filled = example.problem.reading(whole)
        rest = dataclasses.replace(example, problem=filled, lam=kept)
        build = as_function_of_lam(self.dynamics)
        dynamics = self.dynamics if isinstance(self.dynamics, Dynamics) else lambda lam: build(whole(lam))
        return BatteryCase(rest, dynamics, self.label)


@functools.cache
def battery_cases() -> tuple[BatteryCase, ...]:
    """Every example with every dynamics found in the folder, and three whose settings are learned."""
    # A solver that runs to a tolerance has no steps to compare a method with; `check_dynamics` tests it.
    found = [one for cls in all_dynamics.find().values() for one in cls.examples() if one.differentiable]
    # The simplest dynamics first, so that an error that occurs everywhere is reported for them.
    found.sort(key=lambda dynamics: not isinstance(dynamics, (GradientDescent, HeavyBall)))
    every = [
        BatteryCase(example.for_dynamics(dynamics), dynamics, str(dynamics))
        for example in examples()
        for dynamics in found
    ]
    learned: list[tuple[str, float, frozenset[Part], DynamicsLike]] = [
        ("lr", 0.3, frozenset({"the dynamics"}), lambda lam: GradientDescent(lam["lr"])),
        ("momentum", 0.4, frozenset({"the dynamics"}), lambda lam: HeavyBall(0.2, lam["momentum"])),
        ("strength", 0.05, frozenset({"the fixed point"}), lambda lam: ISTA(0.3, L1(lam["strength"]))),
    ]
    smooth = examples()[1]
    # An outer objective with a method of its own; two dynamics suffice, because its inner objective is in `every`.
    plain = GradientDescent(0.2), HeavyBall(0.2, 0.4)
    every += [BatteryCase(left_out(), dynamics, str(dynamics)) for dynamics in plain]
    return tuple(every) + tuple(
        BatteryCase(with_setting(smooth, name, value, places), build, f"a dynamics with a learned {name}")
        for name, value, places, build in learned
    )


def with_setting(example: Example, name: str, value: float, places: frozenset[Part]) -> Example:
    """The example with one more number in λ, for the dynamics to read."""
    lam = {**example.lam, name: torch.tensor(value, dtype=torch.float64)}
    return dataclasses.replace(example, lam=lam, enters={**example.enters, name: places})


def exact_methods() -> list[Method]:
    """Every instance of every exact method found in the folder."""
    return [instance for cls in methods.find().values() for instance in cls.examples() if instance.exact]


@functools.cache
def exact_gradient(case: BatteryCase, steps: int, method: Method) -> Tree:
    """∇f_T by an exact method in float64; cached, because every method is compared with it."""
    case = case.in_double() if case.example.single else case
    args, settings = case.arguments(steps)
    return hypergradient(*args, method=method, **settings).grad


@functools.cache
def at_rest(case: BatteryCase, tolerance: float) -> bool:
    """Whether w has converged after LIMIT steps, to a thousandth of the tolerance."""
    bound, quarter = case.process(LIMIT).bound, LIMIT // 4
    # A dynamics that stops ends at a point that depends on its tolerance.
    if callable(case.example.task.train) or bound.dynamics.stops:
        return False
    with torch.no_grad():
        state, moved = bound.start(), []
        for first in range(1, LIMIT, quarter):
            before = state[0]
            for t in range(first, first + quarter):
                state = bound.step(state, t)
            moved.append(float(trees.norm(trees.subtract(state[0], before)) / trees.norm(state[0])))
            # If w still moves by a hundredth half way, it will not have converged at the end.
            if first > quarter and moved[-1] > 1e-2:
                return False
    return moved[-1] <= 1e-3 * tolerance


@functools.cache
def slopes(case: BatteryCase, steps: int) -> Tree:
    """A tree like λ: f_T's slope by central differences along `directions_in_each_leaf`, in float64."""
    case = case.in_double() if case.example.single else case
    (problem, lam, task), settings = case.arguments(steps)
    directions = directions_in_each_leaf(lam)
    found = [slope_along(lambda lam: value_of(problem, lam, task, **settings), lam, d) for d in directions]
    return trees.flatten(lam)[1].unflatten(torch.tensor(slope, dtype=torch.float64) for slope in found)


def along(grad: Tree) -> Tree:
    """The slopes along the same directions according to a gradient."""
    products = [trees.dot(grad, direction).double() for direction in directions_in_each_leaf(grad)]
    return trees.flatten(grad)[1].unflatten(products)
