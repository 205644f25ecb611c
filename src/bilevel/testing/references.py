"""What the batteries compare with: every example with every dynamics, and the gradients that are known to be right."""

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
from bilevel.hypergradients import hypergradient, value_of
from bilevel.methods import Method
from bilevel.methods.base import Part
from bilevel.methods.process import Process
from bilevel.problem import Problem
from bilevel.testing.differences import directions_in_each_leaf, slope_along
from bilevel.testing.problems import Example, examples
from bilevel.trees import Tree

# Not a multiple of anything, so that checkpoint segments come out uneven.
STEPS = 7
# Enough for gradient descent on the examples, whose error falls by 0.74 a step, to reach 1e-12.
LIMIT = 100
EXACT = 1e-10
DIFFERENCES = 1e-6
# What float32 is allowed against the same computation in float64.
SINGLE = 1e-4


@dataclass(frozen=True, eq=False)
class Pair:
    """An example and a dynamics, or a function of λ that returns one."""

    example: Example
    dynamics: DynamicsLike
    label: str

    def __str__(self) -> str:
        return f"{self.label} on the {self.example.name} problem"

    def process(self, steps: int) -> Process:
        return Process(self.example.problem, self.example.lam, self.example.task, self.dynamics, steps)

    def arguments(self, steps: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What `hypergradient` and `value_of` take."""
        example = self.example
        return (example.problem, example.lam, example.task), {"dynamics": self.dynamics, "steps": steps}

    def in_double(self) -> Pair:
        return dataclasses.replace(self, example=self.example.to(torch.float64))

    @functools.cache  # noqa: B019 - pairs live as long as the process
    def visible(self, seen: frozenset[Part]) -> Pair | None:
        """The pair with those parts of λ only that enter at a place in `seen`; the others become constants."""
        example = self.example
        fixed = {key: value for key, value in example.lam.items() if not example.enters[key] & seen}
        kept = {key: value for key, value in example.lam.items() if key not in fixed}
        if not fixed or not kept:
            return self if kept else None

        def whole(lam: Tree) -> Tree:
            dtype = trees.leaves(lam)[0].dtype
            return {**trees.map(lambda leaf: leaf.to(dtype), fixed), **lam}

        def filled(base: Problem) -> Problem:
            encode = base.encode
            return Problem(
                inner=lambda w, lam, batch: base.inner(w, whole(lam), batch),
                outer=lambda w, lam, batch: base.outer(w, whole(lam), batch),
                init=lambda lam: base.init(whole(lam)),
                encode=None if encode is None else lambda lam, task: encode(whole(lam), task),
            )

        written = None if example.written is None else filled(example.written)
        rest = dataclasses.replace(example, problem=filled(example.problem), lam=kept, written=written)
        build = as_function_of_lam(self.dynamics)
        dynamics = self.dynamics if isinstance(self.dynamics, Dynamics) else lambda lam: build(whole(lam))
        return Pair(rest, dynamics, self.label)


@functools.cache
def pairs() -> tuple[Pair, ...]:
    """Every example with every dynamics found in the folder, and three whose settings are learned."""
    found = [instance for cls in all_dynamics.find().values() for instance in cls.examples()]
    # The plainest first: what is wrong everywhere is then reported there.
    found.sort(key=lambda dynamics: not isinstance(dynamics, (GradientDescent, HeavyBall)))
    every = [Pair(example, dynamics, str(dynamics)) for example in examples() for dynamics in found]
    learned: list[tuple[str, float, frozenset[Part], DynamicsLike]] = [
        ("lr", 0.3, frozenset({"the dynamics"}), lambda lam: GradientDescent(lam["lr"])),
        ("momentum", 0.4, frozenset({"the dynamics"}), lambda lam: HeavyBall(0.2, lam["momentum"])),
        ("strength", 0.05, frozenset({"the fixed point"}), lambda lam: ISTA(0.3, L1(lam["strength"]))),
    ]
    smooth = examples()[1]
    return tuple(every) + tuple(
        Pair(with_setting(smooth, name, value, places), build, f"a dynamics with a learned {name}")
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
def exact_gradient(pair: Pair, steps: int, method: Method) -> Tree:
    """∇f_T by a method that is exact, in float64; kept, because every method is compared with it."""
    pair = pair.in_double() if pair.example.single else pair
    args, settings = pair.arguments(steps)
    return hypergradient(*args, method=method, **settings).grad


@functools.cache
def at_rest(pair: Pair, tolerance: float) -> bool:
    """Whether w has stopped moving after LIMIT steps, to a thousandth of the tolerance."""
    if callable(pair.example.task.train):
        return False
    bound, quarter = pair.process(LIMIT).bound, LIMIT // 4
    with torch.no_grad():
        state, moved = bound.start(), []
        for first in range(1, LIMIT, quarter):
            before = state[0]
            for t in range(first, first + quarter):
                state = bound.step(state, t)
            moved.append(float(trees.norm(trees.subtract(state[0], before)) / trees.norm(state[0])))
            # What still moves by a hundredth half way will not have come to rest at the end.
            if first > quarter and moved[-1] > 1e-2:
                return False
    return moved[-1] <= 1e-3 * tolerance


@functools.cache
def slopes(pair: Pair, steps: int) -> Tree:
    """A tree like λ: f_T's slope by central differences along `directions_in_each_leaf`, in float64."""
    pair = pair.in_double() if pair.example.single else pair
    (problem, lam, task), settings = pair.arguments(steps)
    directions = directions_in_each_leaf(lam)
    found = [slope_along(lambda lam: value_of(problem, lam, task, **settings), lam, d) for d in directions]
    return trees.flatten(lam)[1].unflatten(torch.tensor(slope, dtype=torch.float64) for slope in found)


def along(grad: Tree) -> Tree:
    """What a gradient says about the same slopes."""
    products = [trees.dot(grad, direction).double() for direction in directions_in_each_leaf(grad)]
    return trees.flatten(grad)[1].unflatten(products)
