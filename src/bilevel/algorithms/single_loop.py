"""The base class of single-loop algorithms: w, the solution v of the linear system, and λ move together, on batches."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from bilevel import trees
from bilevel.algorithms.base import Algorithm, OuterProblem
from bilevel.algorithms.draws import BatchSource, Draws
from bilevel.algorithms.stability import GROWTH, Bounds
from bilevel.algorithms.step_sizes import STEEPER, Probe, neumann_terms, step_size
from bilevel.distributed import current_world
from bilevel.engine.checks import check_process
from bilevel.engine.method import Hypergradient, Stats
from bilevel.engine.oracles import Derivatives, FirstDerivatives, Triple, plain, restored
from bilevel.engine.process import Process
from bilevel.engine.samplers import check_draws
from bilevel.errors import BilevelError, BilevelWarning, DivergenceError, Outcome
from bilevel.methods.f2sa import F2SA
from bilevel.methods.implicit.method import Implicit
from bilevel.problem import Task
from bilevel.tasks.shards import number_of_parts, part
from bilevel.trees import Tree

Memory = dict[str, Any]
StepSize = float | Callable[[int], float] | None
# The number of batches of each level from which step sizes are chosen.
PROBED = 8
# Of a fixed set, the largest curvature is taken from as many more: those that stretch a random vector most.
STEEP = 2
# Default step sizes fall like (1 + k/DELAY)^−exponent.
DELAY = 100


class Move(NamedTuple):
    """One iteration: E and the directions at the old point, the new point, and the algorithm's memory."""

    value: Tensor
    direction: Triple
    point: Triple
    memory: Memory


@dataclass(frozen=True)
class Rates:
    """The step sizes of an iteration: `inner` for w and v, `outer` for λ; and the Neumann series: `terms`, and the η of
    its factors I − η ∇²_w L, or what else an algorithm calls `eta`; and the `unit` in which it counts L."""

    inner: float
    outer: float
    terms: int = 0
    eta: float = 0.0
    unit: float = 1.0


@dataclass(frozen=True)
class SingleLoop(Algorithm):
    """Moves w, v ≈ −(∇²_w L)⁻¹ ∇_w E and λ together, on batches of the training and the validation data.

    No inner problem is solved: `solve` takes no `dynamics`, `steps` or `method` with such an algorithm. `train` and
    `val` of the task are samplers (`Minibatches`, `FixedBatches`, or any pure function of the draw t = 1, 2, …) or
    batches. A hyperiteration is one update of λ. The value in the history is E on the batch that was drawn.
    `gradient_norm` is the norm of all three directions, that of λ projected, which vanish together at a solution.

    Args:
        inner_lr: the step size of w and v: a number, a function of the iteration k = 0, 1, …, or None for 1/ν, with the
            largest curvature ν of the inner objective on eight batches, and the steepest others of a fixed set, falling
            with k where the algorithm needs that.
        outer_lr: the step size of λ, likewise; None estimates the largest stable one at the start, and takes half. If
            both are None, they are chosen again where λ has made the inner objective steeper, and a step of λ is no
            longer than the distance over which its curvature grows by half.
        compiled: compile the derivatives. It takes about half a minute and needs a C++ compiler.
        seed: of the random integers that the algorithm draws.
    """

    moves_w: ClassVar[bool] = True
    resumes: ClassVar[bool] = True
    # With `inner_lr=None` and `outer_lr=None` the step sizes fall with these exponents.
    exponents: ClassVar[tuple[float, float]] = (0.0, 0.0)
    # η falls with this exponent.
    eta_exponent: ClassVar[float] = 0.0
    # The fraction of 1/ν that `inner_lr=None` takes.
    share: ClassVar[float] = 1.0
    # It stores a gradient of every batch, or computes the mean over all batches from time to time.
    finite_sum: ClassVar[bool] = False
    # Its noise vanishes at the solution.
    variance_reduced: ClassVar[bool] = False
    # On batches, the mean of a step is the step on the whole data.
    unbiased: ClassVar[bool] = True
    # It uses `eta` or `terms` of its `Rates`, which come from the curvature of L.
    needs_curvature: ClassVar[bool] = True
    # It differentiates gradients of the inner objective.
    second_derivatives: ClassVar[bool] = True
    # The settings that are numbers of steps, terms or iterations. None is allowed if it is the default.
    counts: ClassVar[tuple[str, ...]] = ()

    inner_lr: StepSize = field(default=None, kw_only=True)
    outer_lr: StepSize = field(default=None, kw_only=True)
    compiled: bool = field(default=False, kw_only=True)
    seed: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("inner_lr", "outer_lr"):
            size = getattr(self, name)
            if size is not None and not callable(size):
                step_size(name, size, 0)
        for name in self.counts:
            number, optional = getattr(self, name), type(self).__dataclass_fields__[name].default is None
            if not (number is None and optional) and (
                isinstance(number, bool) or not isinstance(number, int) or number < 1
            ):
                raise BilevelError(
                    f"{type(self).__name__}({name}={number!r}) is not a number; pass an int ≥ 1{' or None' * optional}."
                )

    @abstractmethod
    def step(self, at: Derivatives, point: Triple, memory: Memory, draw: Draws, rates: Rates) -> Move:
        """One iteration. It changes neither the point nor the memory that it is given: the loop may save both."""

    def begin(self, at: Derivatives, point: Triple, train: BatchSource, val: BatchSource) -> Memory:
        """The algorithm's memory before the first iteration."""
        return {}

    def draws(self, terms: int) -> tuple[int, int]:
        """The most batches of train and val that an iteration draws."""
        return 1, 1

    @property
    def inner_steps_taken(self) -> int:
        """How many steps of w an iteration takes: the setting `inner_steps`, if the algorithm has it."""
        return getattr(self, "inner_steps", 1)

    def outer_step(self, probe: Probe, inner_lr: float) -> float:
        """The step size of λ that `outer_lr=None` begins with."""
        return probe.outer_step(inner_lr * self.inner_steps_taken)

    def scales(self, probe: Probe, nu: float, rates: Rates) -> tuple[float, float]:
        """The `eta` and `unit` of `Rates` at the start, for the largest curvature ν of L and the step sizes."""
        return 1 / nu, 1.0

    def check_data(self, train: BatchSource, val: BatchSource) -> None:
        """Refuse data that the algorithm cannot use."""
        name = type(self).__name__
        for side, source in (("train", train), ("val", val)):
            if self.finite_sum and source.count is None:
                raise BilevelError(
                    f"{name} needs objectives that are means over a fixed set of batches, but task.{side} is "
                    f"{type(source.given).__name__}, which draws new batches without end. Pass "
                    f"bilevel.FixedBatches(data, size) as {side}, or use SOBA, which needs no such set."
                )

    def minimise(self, outer: OuterProblem) -> Outcome:
        run = _SingleLoopRun.of(self, outer)
        outer.keep(run.state)
        while True:
            move = self.step(run.at, run.point, run.memory, run.draw(), run.rates())
            run.report(move)
            run.accept(move)


@dataclass
class _SingleLoopRun:
    """The state of one run."""

    algorithm: SingleLoop
    outer: OuterProblem
    at: Derivatives
    train: BatchSource
    val: BatchSource
    point: Triple
    k: int = 0
    chosen: dict[str, float] = field(default_factory=dict)
    memory: Memory = field(default_factory=dict)
    # The chosen step sizes are used for λ whose components are at most `chosen["radius"]` away from here.
    centre: Tensor | None = None
    # Directions that are longer than this are looked at.
    alarm: float | None = None
    # The numbers of more training batches from which the largest curvature is taken; None until they are searched for.
    steep: list[int] | None = None

    @classmethod
    def of(cls, algorithm: SingleLoop, outer: OuterProblem) -> _SingleLoopRun:
        """Check the arguments once, and choose the step sizes that were not given."""
        assert outer.task is not None and outer.process is not None, "solve passes both"
        train, val = BatchSource(outer.task.train, "train"), BatchSource(outer.task.val, "val")
        algorithm.check_data(train, val)
        for source in (train, val):
            check_draws(source.name, source.given, source.count)
        lam = outer.lam if outer.saved is None else outer.saved["example"]
        # An example for the checks: the first shard of a batch that is cut into shards.
        first = [source(1) for source in (train, val)]
        _warn_of_idle_processes(algorithm, min(map(number_of_parts, first)))
        process = outer.process(lam, Task(*(part(batch, 0) for batch in first)))
        _check(algorithm, process)
        kind = Derivatives if algorithm.second_derivatives else FirstDerivatives
        at = kind(process, algorithm.compiled)
        with torch.no_grad():
            w = at.w.vector(process.bound.start()[0])
        run = cls(algorithm, outer, at, train, val, Triple(w, torch.zeros_like(w), at.lam.vector(lam)))
        if outer.saved is not None:
            run.load(outer.saved)
        else:
            run.choose()
            run.memory = algorithm.begin(at, run.point, train, val)
        return run

    def choose(self) -> None:
        """Refuse a non-convex inner problem, and choose the step sizes that were not given.

        The curvature of every batch is measured only if a step size or the algorithm needs it.
        """
        algorithm, probe = self.algorithm, self.probe(self.point)
        self.chosen = {"inner": 0.0, "outer": 0.0, "eta": 0.0, "terms": 0}
        if algorithm.inner_lr is None or algorithm.needs_curvature:
            if self.steep is None:
                self.steep = self.train.numbers_of_largest(probe.images, PROBED, STEEP)
                probe = self.probe(self.point)
            mu, nu, steepest = probe.curvatures()
            terms = getattr(algorithm, "terms", 0)
            self.chosen |= {"nu": nu, "inner": algorithm.share / nu, "steepest": steepest}
            self.chosen["terms"] = neumann_terms(mu, nu) if terms is None else terms
        else:
            probe.check_convexity()
        if algorithm.outer_lr is None:
            self.chosen["outer"] = algorithm.outer_step(probe, self.rates(0).inner)
        scales = algorithm.scales(probe, self.chosen.get("nu", math.nan), self.rates(0))
        self.chosen["eta"], self.chosen["unit"] = scales

    def shortened(self, move: Move) -> Move:
        """The move, with a step of λ that does not leave the neighbourhood in which the step sizes are stable."""
        before = self.point.lam
        step = move.point.lam - before
        length = float(step.abs().max())
        if not 0 < length < math.inf:
            return move
        if self.centre is None:
            self.recentre(4 * length)
        if length <= self.chosen["radius"]:
            return move
        lam = before + self.chosen["radius"] / length * step
        return move._replace(point=replace(move.point, lam=lam))

    def recentre(self, most: float) -> None:
        """Choose step sizes again if L is steeper here than where they were chosen, and find how far λ may move."""
        probe, before = self.probe(self.point), self.chosen
        nu = probe.steepness(self.point.lam)
        # This batch may have no curvature where w has moved to.
        steeper = nu / before.setdefault("steepness", nu or before["nu"])
        if steeper > STEEPER**0.5:
            try:
                self.choose()
            except BilevelError:
                # There is no curvature to choose by. Shorter steps are stable.
                self.chosen = before | {name: before[name] / steeper for name in ("inner", "outer", "eta")}
            self.chosen["steepness"] = nu
        self.centre = self.point.lam
        self.chosen["radius"] = probe.radius(most, STEEPER * self.chosen["steepness"])

    def probe(self, at: Triple) -> Probe:
        # Compiling takes longer than these few products.
        plain, name = replace(self.at, compiled=False), type(self.algorithm).__name__
        train, val = self.train.some(PROBED), self.val.some(PROBED)
        steep = [self.train.numbered(index) for index in self.steep or []]
        return Probe(name, plain, at, train, val, steep, int(self.chosen.get("steepest", 0)))

    def rates(self, k: int | None = None) -> Rates:
        k = self.k if k is None else k
        sizes = []
        for given, name, exponent in zip(
            (self.algorithm.inner_lr, self.algorithm.outer_lr),
            ("inner", "outer"),
            self.algorithm.exponents,
            strict=True,
        ):
            if given is None:
                sizes.append(self.chosen[name] * (1 + k / DELAY) ** -exponent)
            else:
                sizes.append(step_size(f"{name}_lr", given, k))
        eta = self.chosen["eta"] * (1 + k / DELAY) ** -self.algorithm.eta_exponent
        return Rates(sizes[0], sizes[1], int(self.chosen["terms"]), eta, self.chosen.get("unit", 1.0))

    def draw(self) -> Draws:
        return Draws(self.train, self.val, self.k, self.algorithm.draws(int(self.chosen["terms"])), self.algorithm.seed)

    def report(self, move: Move) -> None:
        """Report the iteration to the loop, which may end here."""
        direction, at = move.direction, self.at
        norm = direction.norm()
        if self.alarm is None:
            self.alarm = GROWTH * norm
        if not (math.isfinite(norm) and norm <= self.alarm):
            self.refuse_divergence(norm)
            self.alarm = GROWTH * norm
        if self.outer.constraint is not None:
            there = self.projected(self.point.lam - direction.lam)
            norm = replace(direction, lam=self.point.lam - there).norm()
        stats = Stats(type(self.algorithm).__name__, steps=self.algorithm.inner_steps_taken)
        result = Hypergradient(move.value, at.lam.tree(direction.lam), at.w.tree(move.point.w), stats)
        assert self.outer.report is not None
        self.outer.report(at.lam.tree(self.point.lam), result, norm)

    def accept(self, move: Move) -> None:
        automatic = self.algorithm.inner_lr is None and self.algorithm.outer_lr is None
        if automatic:
            move = self.shortened(move)
        self.point, self.memory, self.k = move.point, move.memory, self.k + 1
        if self.outer.constraint is not None:
            self.point = replace(self.point, lam=self.projected(self.point.lam))
        if automatic and self.centre is not None:
            distance, radius = float((self.point.lam - self.centre).abs().max()), self.chosen["radius"]
            if radius < distance < math.inf:
                self.recentre(4 * radius)

    def projected(self, lam: Tensor) -> Tensor:
        assert self.outer.constraint is not None
        return self.at.lam.vector(self.outer.constraint.project(self.at.lam.tree(lam)))

    def refuse_divergence(self, norm: float) -> None:
        """Raise the error that names the step size that is too large, if directions of this norm show that one is."""
        finite, first = math.isfinite(norm), self.rates(0) if not math.isfinite(norm) else self.rates()
        if not finite:
            self.draw().refuse_non_finite()
        start = Triple(self.at.w.vector(self.at.bound.start()[0]), self.point.v * 0, self.at.lam.vector(self.outer.lam))
        probe = self.probe(start)
        nu = self.chosen["nu"] if "nu" in self.chosen else probe.curvatures()[1]
        bounds = Bounds.of(probe, nu, self.point.lam, lambda: self.algorithm.outer_step(probe, first.inner))
        broken = bounds.broken(first.inner, first.outer, self.rates().inner)
        if finite and broken is None:
            return
        what = f"directions have grown to {norm:.3g}." if finite else "a direction is not finite."
        where = f"{type(self.algorithm).__name__} diverged in iteration {self.k}: {what}"
        raise DivergenceError(f"{where} {broken or bounds.kept(first.outer)}")

    def state(self) -> Tree:
        memory = {name: plain(value) for name, value in self.memory.items()}
        example = trees.clone(self.at.lam.tree(self.point.lam))
        return {
            "k": self.k,
            "point": plain(self.point),
            "memory": memory,
            "chosen": dict(self.chosen),
            "centre": self.centre,
            "alarm": self.alarm,
            "steep": self.steep,
            "example": example,
        }

    def load(self, saved: Tree) -> None:
        self.k, self.chosen, self.point = saved["k"], dict(saved["chosen"]), restored(saved["point"])
        self.memory = {name: restored(value) for name, value in saved["memory"].items()}
        self.centre, self.alarm, self.steep = saved["centre"], saved.get("alarm"), saved.get("steep")


def _warn_of_idle_processes(algorithm: SingleLoop, parts: int) -> None:
    size = current_world().size
    if size > parts:
        warnings.warn(
            f"{size} processes run {type(algorithm).__name__}, and its batches have {parts} part{'s' * (parts > 1)} to "
            f"share, so that processes compute the same or wait. Cut them: Task(shards(train, {size}), "
            f"shards(val, {size})).",
            BilevelWarning,
            stacklevel=2,
        )


def _check(algorithm: SingleLoop, process: Process) -> None:
    """The checks of a method that differentiates what the algorithm differentiates."""
    name, method = type(algorithm).__name__, Implicit() if algorithm.second_derivatives else F2SA()
    if process.problem.encode is not None:
        raise BilevelError(
            f"{name} draws a new batch for every product, and encode maps the data of a whole task once. Leave encode "
            "out of the problem, and call it on the batch in inner and outer."
        )
    if process.problem.fixed_point is not None:
        raise BilevelError(
            f"{name} moves w along the gradient of an inner objective, but this problem is given by a fixed point or a "
            "root. Pass inner=…, or use Descent()."
        )
    try:
        check_process(process, method)
    except DivergenceError:
        raise
    except BilevelError as error:
        like = type(method).__name__
        how = "differentiates implicitly" if algorithm.second_derivatives else "compares inner solutions"
        raise BilevelError(f"{name} {how}, and refuses what {like} refuses. {error}") from error
