"""The battery for single-loop algorithms, on a finite sum of quadratics with a known solution."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bilevel import trees
from bilevel.algorithms.base import OuterProblem
from bilevel.algorithms.draws import BatchSource, Draws
from bilevel.algorithms.single_loop import Memory, Move, Rates, SingleLoop
from bilevel.constraints.box import Box
from bilevel.dynamics.gradient_descent import GradientDescent
from bilevel.engine.method import Hypergradient
from bilevel.engine.oracles import Derivatives, Triple
from bilevel.errors import Outcome
from bilevel.hypergradients import Evaluator
from bilevel.hyperiterations import LoopEnded
from bilevel.outer_loop import Iteration, solve
from bilevel.problem import Problem, Task
from bilevel.tasks.fixed_batches import FixedBatches
from bilevel.trees import Tree

# (distance, iterations): how close to the solution, relative to its norm, an algorithm comes in how many iterations.
# Where sampling noise remains, the mean over the second half of the iterates is compared.
NOISY, REDUCED = (0.1, 200), (1e-8, 500)
# Iterations whose draws have more outcomes than this are not enumerated.
MOST_OUTCOMES = 24


@dataclass(frozen=True)
class FiniteSum:
    """L_i = ½ wᵀA_i w + λᵀC_i w + b_iᵀw and E_j = ½ wᵀF_j w + ½ λᵀG_j λ + c_jᵀw + e_jᵀλ, with `count` terms each."""

    train: tuple[Tensor, ...]
    val: tuple[Tensor, ...]

    @classmethod
    def drawn(cls, count: int, noise: float, seed: int = 0) -> FiniteSum:
        generator = torch.Generator().manual_seed(seed)

        def noisy(mean: Tensor, symmetric: bool = False) -> Tensor:
            parts = noise * torch.randn(count, *mean.shape, generator=generator, dtype=torch.float64)
            parts = (parts + parts.transpose(1, 2)) / 2 if symmetric else parts
            return mean + parts - parts.mean(0)

        def vector(size: int) -> Tensor:
            return torch.randn(size, generator=generator, dtype=torch.float64)

        curvatures = torch.tensor([1.0, 1.3, 1.6], dtype=torch.float64)
        A, F = noisy(curvatures.diag(), True), noisy(curvatures.flip(0).diag(), True)
        G = noisy(torch.eye(2, dtype=torch.float64), True)
        C = noisy(0.7 * torch.randn(2, 3, generator=generator, dtype=torch.float64))
        return cls((A, C, noisy(vector(3))), (F, G, noisy(vector(3)), noisy(vector(2))))

    @property
    def problem(self) -> Problem:
        return Problem(
            inner=lambda w, lam, x: ((x[0] @ w) @ w / 2 + (x[1] @ w) @ lam["x"] + x[2] @ w).mean(),
            outer=lambda w, lam, x: (
                (x[0] @ w) @ w / 2 + (x[1] @ lam["x"]) @ lam["x"] / 2 + x[2] @ w + x[3] @ lam["x"]
            ).mean(),
            init=lambda lam: torch.zeros(3, dtype=torch.float64),
        )

    @property
    def task(self) -> Task:
        return Task(FixedBatches(self.train, 1), FixedBatches(self.val, 1, seed=1))

    @property
    def solution(self) -> Tensor:
        """argmin f, from the normal equations."""
        A, C, b = (x.mean(0) for x in self.train)
        F, G, c, e = (x.mean(0) for x in self.val)
        slope, start = -torch.linalg.solve(A, C.T), -torch.linalg.solve(A, b)
        return -torch.linalg.solve(slope.T @ F @ slope + G, slope.T @ (F @ start + c) + e)


def check_single_loop(algorithm: SingleLoop) -> None:
    """Check that an algorithm converges, is unbiased and obeys the loop; raise an `AssertionError` that says what is
    wrong.

    It comes close to the known solution: to 1e-8 if it reduces variance, within a tenth otherwise. Averaged over all
    draws, which are enumerated if there are few, two iterations equal two iterations on the whole data, unless the
    algorithm declares that it is biased. Every λ lies in the constraint. It stops when the loop ends. It resumes from a
    saved state with the same numbers.
    """
    data, lam = FiniteSum.drawn(8, 0.1), {"x": torch.ones(2, dtype=torch.float64)}
    # The truncation of a series is a bias of its own, so only instances that choose its length must converge.
    if getattr(algorithm, "terms", None) is None:
        close, iterations = REDUCED if algorithm.variance_reduced else NOISY
        passed: list[Tensor] = []
        found = solve(
            data.problem,
            lam,
            data.task,
            algorithm=algorithm,
            iterations=iterations,
            progress=False,
            callbacks=[lambda here: passed.append(here.lam["x"])],
        )
        reached = found.outer["x"] if algorithm.variance_reduced else torch.stack(passed[iterations // 2 :]).mean(0)
        distance = float((reached - data.solution).norm() / data.solution.norm())
        assert distance < close, f"{algorithm} did not minimise a quadratic: λ is {distance:.3g} away, not {close:g}."
    if algorithm.unbiased and can_enumerate(algorithm):
        check_unbiased(algorithm)

    seen: list[Iteration] = []
    box = Box(0.9, 1.1)
    settings: dict[str, Any] = {"algorithm": algorithm, "constraint": box, "progress": False}
    solve(data.problem, lam, data.task, iterations=20, callbacks=[seen.append], **settings)
    outside = max(float((here.lam["x"] - box.project(here.lam)["x"]).abs().max()) for here in seen)
    assert outside <= 0, f"{algorithm} left the constraint, by {outside:.3g}"
    assert bool((lam["x"] == 1).all()), f"{algorithm} changed the λ that it was given"
    stopped = solve(data.problem, lam, data.task, iterations=20, callbacks=[lambda here: here.k == 2], **settings)
    assert len(stopped.history["value"]) == 3, f"{algorithm} went on after a callback ended the loop"

    whole, states = _evaluated(algorithm, data, lam, None, 7)
    resumed, _ = _evaluated(algorithm, data, lam, states[4], 3)
    assert all(map(torch.equal, whole[4:], resumed)), f"{algorithm} resumed from a saved state with other numbers"


def check_unbiased(algorithm: SingleLoop) -> None:
    """Compare the mean over all draws of two iterations with two iterations on the whole data.

    On quadratics every direction is affine in each of its batches, so the two must be equal.
    """
    mean, exact = _two_iterations(algorithm, 1), _two_iterations(algorithm, 2)
    for name in ("w", "v", "lam"):
        distance = float((getattr(mean, name) - getattr(exact, name)).abs().max())
        assert distance < 1e-10, (
            f"{algorithm} is biased: averaged over all draws of two iterations, {name} is {distance:.3g} away from two "
            "iterations on the whole data. Does it use a batch twice in one product?"
        )


def can_enumerate(algorithm: SingleLoop) -> bool:
    """Whether the draws of an iteration have so few outcomes that all can be tried."""
    setting = _Setting.of(algorithm, 1)
    found = setting.outcomes(setting.point, setting.memory, 1)
    return sum(1 for _ in zip(found, range(MOST_OUTCOMES + 1), strict=False)) <= MOST_OUTCOMES


def _two_iterations(algorithm: SingleLoop, size: int) -> Triple:
    """The mean of the point after two iterations over all draws of batches of this size."""
    setting, total = _Setting.of(algorithm, size), Triple(*[torch.zeros((), dtype=torch.float64)] * 3)
    for probability, first in setting.outcomes(setting.point, setting.memory, 0):
        for share, second in setting.outcomes(first.point, first.memory, 1):
            point = second.point
            total = total + Triple(*(probability * share * x for x in (point.w, point.v, point.lam)))
    return total


@dataclass(frozen=True)
class _Setting:
    """An algorithm at a random point of a finite sum with two terms on each level."""

    algorithm: SingleLoop
    at: Derivatives
    point: Triple
    memory: Memory
    rates: Rates
    train: BatchSource
    val: BatchSource

    @classmethod
    def of(cls, algorithm: SingleLoop, size: int) -> _Setting:
        data = FiniteSum.drawn(2, 0.5, seed=1)
        lam = {"x": torch.tensor([0.3, -0.8], dtype=torch.float64)}
        at = Derivatives(Evaluator(data.problem, GradientDescent(1e-3), 1).process(lam, Task(data.train, data.val)))
        w, v = torch.randn(2, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        point = Triple(w, v, lam["x"])
        rates = Rates(0.2, 0.3, getattr(algorithm, "terms", None) or 3, 0.25)
        train, val = (BatchSource(FixedBatches(getattr(data, name), size), name) for name in ("train", "val"))
        return cls(algorithm, at, point, algorithm.begin(at, point, train, val), rates, train, val)

    def outcomes(self, point: Triple, memory: Memory, k: int) -> Iterator[tuple[float, Move]]:
        """Every outcome of an iteration, with its probability."""
        given: tuple[int, ...] | None = ()
        while given is not None:
            draw = _Chosen(self.train, self.val, k, (1, 1), given=given)
            # A copy for each outcome, because a table may be filled in place.
            copied = {name: value.clone() if isinstance(value, Tensor) else value for name, value in memory.items()}
            move = self.algorithm.step(self.at, point, copied, draw, self.rates)
            yield draw.probability, move
            given = _next_outcome([*given, *[0] * (len(draw.options) - len(given))], draw.options)


@dataclass
class _Chosen(Draws):
    """Draws whose outcomes are given; the number of possible outcomes of each is recorded."""

    given: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.options: list[int] = []
        self.probability = 1.0

    def _next(self, options: int) -> int:
        place = len(self.options)
        self.options.append(options)
        self.probability /= options
        return self.given[place] if place < len(self.given) else 0

    def inner(self) -> Tree:
        return self.train[self.inner_index()]

    def outer(self) -> Tree:
        return self.val[self.outer_index()]

    def inner_index(self) -> int:
        return self._next(self.train.count or 1)

    def outer_index(self) -> int:
        return self._next(self.val.count or 1)

    def integer(self, below: int) -> int:
        return self._next(below)


def _next_outcome(given: list[int], options: list[int]) -> tuple[int, ...] | None:
    """The next outcome in the order of an odometer; None after the last."""
    for place in reversed(range(len(given))):
        if given[place] + 1 < options[place]:
            return (*given[:place], given[place] + 1)
    return None


def _evaluated(
    algorithm: SingleLoop, data: FiniteSum, lam: Tree, saved: Tree | None, count: int
) -> tuple[list[Tensor], list[Tree]]:
    """The first `count` values of λ, from a saved state if there is one, and the states."""
    points, states, kept = list[Tensor](), list[Tree](), list[Callable[[], Tree]]()

    def report(lam: Tree, result: Hypergradient, norm: float) -> None:
        if len(points) == count:
            raise LoopEnded(Outcome("finished", "Enough."))
        points.append(lam["x"].clone())
        # Through bytes, as in a checkpoint.
        file = io.BytesIO()
        torch.save(kept[0](), file)
        file.seek(0)
        states.append(torch.load(file, weights_only=True))

    evaluator = Evaluator(data.problem, GradientDescent(1e-3), 1)
    outer = OuterProblem(trees.clone(lam), None, _unused, _unused, saved, kept.append)
    with contextlib.suppress(LoopEnded):
        algorithm.minimise(replace(outer, task=data.task, process=evaluator.process, report=report))
    return points, states


def _unused(lam: Tree) -> Hypergradient:
    raise AssertionError("An algorithm that moves w itself asked for a hypergradient through inner steps")
