"""All penalties of an additive model at once, by hypergradients of its leave-one-out loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bilevel.algorithms.lbfgsb import LBFGSB
from bilevel.constraints.box import Box
from bilevel.dynamics.gradient_descent import GradientDescent
from bilevel.engine.method import Method
from bilevel.errors import Outcome
from bilevel.estimators.additive.design import Piece
from bilevel.estimators.folds import Array
from bilevel.estimators.search import SearchRecord
from bilevel.hypergradients import hypergradient
from bilevel.methods.linear_models.kernel_equations import KernelEquations
from bilevel.methods.linear_models.newton_left_out import NewtonLeftOut
from bilevel.methods.linear_models.normal_equations import NormalEquations
from bilevel.outer_loop import Iteration, solve
from bilevel.problem import Problem, Task
from bilevel.structures.least_squares import LeastSquares
from bilevel.structures.leave_one_out import LeaveOneOut
from bilevel.structures.left_out import LeftOutLoss
from bilevel.structures.linear_models import LinearModels
from bilevel.structures.losses import RowLoss, SquaredError
from bilevel.structures.penalties import FunctionOfLam, GroupPenalties

# A log penalty of 0 means a prior variance of 100 times the variance of one row's mean.
UNIT = 0.01
BOX = (-7.0, 12.0)
# Of a log-loss: where classes are almost separable, one Newton step is too short to tell what a row's absence changes.
LOG_LOSS_BOX = (-3.0, 12.0)
# The price of a degree of freedom beside that of the leave-one-out loss, as a share of it: many penalties can overfit
# the leave-one-out loss alone.
FREEDOM = 0.15
# Of the coefficients of a log-loss, relatively; the last Newton step makes them much more accurate than that.
ACCURACY = 1e-4
GRID = (9.0, 7.0, 5.0, 3.0, 1.0, -1.0, -3.0)


@dataclass(frozen=True, eq=False)
class KindTether(FunctionOfLam):
    """2c Σ_k Σ_{g of kind k} log cosh(λ_g − mean of kind k): how far penalties of one kind have moved apart.

    In the units of a log-likelihood, c = 1/n is the prior density 1/cosh of each log penalty around its kind's level.
    """

    kinds: Array

    def __call__(self, lam: Tensor, *data: Any) -> Tensor:
        kinds = torch.from_numpy(self.kinds)
        sums = lam.new_zeros(int(kinds.max()) + 1).index_add(0, kinds, lam)
        away = lam - (sums / torch.bincount(kinds))[kinds]
        return data[0] * 2 * (torch.logaddexp(away, -away) - math.log(2)).sum()

    def linearised(self, lam: Tensor, *data: Any) -> tuple[Tensor, Callable[[Any], Tensor]]:
        away, weight = lam.detach().numpy(), 2 * float(data[0])
        away = away - self._means(away)
        slope = np.tanh(away)
        slope = weight * (slope - self._means(slope))
        value = weight * (np.logaddexp(away, -away) - math.log(2)).sum()
        return torch.tensor(value, dtype=lam.dtype), lambda v: v * torch.from_numpy(slope)

    def _means(self, numbers: Array) -> Array:
        return (np.bincount(self.kinds, numbers) / np.bincount(self.kinds))[self.kinds]


@dataclass
class TunedPenalties:
    """Penalties, and the model that has them.

    Attributes:
        lam: the log penalty of every group of features.
        value: the leave-one-out loss, without a price of degrees of freedom.
        w: coefficients of shape outputs × features, and an intercept where the loss is not a square.
    """

    lam: Tensor
    value: float
    w: Tensor
    outcome: Outcome | None = None


@dataclass
class LeftOut:
    """The leave-one-out loss of the rows of a matrix, as a function of the penalties of groups of its features.

    Args:
        X: the features. For squared errors, they and the targets are taken about their weighted means.
        outputs: the targets, of shape rows × outputs.
        weight: the positive weight of every row.
        loss: of the scores.
        record: receives the loss, its gradient's norm and the seconds of every evaluation in `minimise`.
    """

    X: Array
    outputs: Array
    weight: Array
    loss: RowLoss
    record: SearchRecord = field(default_factory=SearchRecord)

    def __post_init__(self) -> None:
        self.squares = isinstance(self.loss, SquaredError)
        if self.squares:
            share = self.weight / self.weight.sum()
            self.X, self.outputs = self.X - share @ self.X, self.outputs - share @ self.outputs
        X, y, weight = (torch.from_numpy(np.array(part, order="C")) for part in (self.X, self.outputs.T, self.weight))
        self.total = float(weight.sum())
        # The system of the smaller side.
        self.by_rows = self.squares and X.shape[1] > X.shape[0]
        self.box = BOX if self.squares else LOG_LOSS_BOX
        self.train: tuple[Any, ...]
        self.val: tuple[Any, ...] = (X, y, weight, weight / self.total) if self.squares else (X, y, weight[None])
        if self.squares and not self.by_rows:
            self.train = ((X.mT @ (weight[:, None] * X))[None], ((weight * y) @ X)[None])
        else:
            self.train = (X, y, weight[None])

    @property
    def constant(self) -> float:
        """The loss of a prediction without features, for squares."""
        return 0.5 * float(self.weight @ (self.outputs**2).sum(1)) / self.total

    @property
    def method(self) -> Method:
        if not self.squares:
            return NewtonLeftOut(ACCURACY)
        return KernelEquations() if self.by_rows else NormalEquations()

    def problem(self, groups: Array, kinds: Array, near: float | None = None) -> Problem:
        """The problem of these groups, each of a kind.

        Args:
            near: about what the loss is. Degrees of freedom then have a price; by default they have none.
        """
        size, intercept = self.X.shape[1], not self.squares
        penalty = GroupPenalties(size, torch.from_numpy(groups), UNIT * self.total)
        model = LinearModels(self.loss, penalty, intercept)
        inner = LeastSquares(penalty) if self.squares and not self.by_rows else model
        tether = KindTether(kinds)
        # The variance of a row's error is twice the loss of squares, and its log-loss is in nats already.
        price = 0.0 if near is None else FREEDOM * (2 * near if self.squares else 1)
        outer = LeaveOneOut(penalty, tether, price) if self.squares else LeftOutLoss(model, tether, price)
        shape = (1, self.outputs.shape[1], size + intercept)
        return Problem(inner, outer, init=lambda lam: lam.new_zeros(shape), check_derivatives=False)

    def task(self, strength: float) -> Task:
        return Task(self.train, (*self.val, torch.tensor(strength, dtype=torch.float64)))

    def evaluate(self, problem: Problem, lam: Tensor, start: Tensor | None = None) -> TunedPenalties:
        found = hypergradient(
            problem, lam, self.task(0.0), method=self.method, start=start, dynamics=GradientDescent(1.0), steps=0
        )
        return TunedPenalties(lam, float(found.value), found.inner[0])

    def minimise(
        self,
        groups: Array,
        kinds: Array,
        start: TunedPenalties,
        strength: float,
        near: float,
        algorithm: LBFGSB,
    ) -> TunedPenalties:
        """λ that minimises the priced loss and the tether; its strength is relative to the loss at the start."""
        held = strength * start.value / self.total

        def note(here: Iteration) -> None:
            self.record.add(float(here.hypergradient.value), float(here.hypergradient.grad.norm()))

        found = solve(
            self.problem(groups, kinds, near),
            start.lam,
            self.task(held),
            method=self.method,
            algorithm=algorithm,
            constraint=Box(*self.box),
            iterations=10**9,
            start=start.w[None],
            dynamics=GradientDescent(1.0),
            steps=0,
            callbacks=[note],
            progress=False,
        )
        tuned = self.evaluate(self.problem(groups, kinds), found.outer, found.inner)
        tuned.outcome = found.outcome
        return tuned


def grouped(pieces: list[Piece]) -> tuple[Array, Array, Array, list[str]]:
    """The penalty and the kind of every feature, the kind of every penalty, and the names of the kinds."""
    names = list(dict.fromkeys(piece.kind for piece in pieces))
    kind_of = {piece.penalty: names.index(piece.kind) for piece in pieces}
    size = max(piece.where.stop for piece in pieces)
    own, kind = np.zeros(size, dtype=int), np.zeros(size, dtype=int)
    for piece in pieces:
        own[piece.where], kind[piece.where] = piece.penalty, names.index(piece.kind)
    return own, kind, np.array([kind_of[k] for k in range(len(kind_of))]), list(names)


@dataclass
class KindLevels:
    """One penalty for each kind of part, tuned.

    Attributes:
        tuned: λ has an entry for each of `names`.
        near: about what the loss of a good model is, which sets the price of degrees of freedom.
    """

    tuned: TunedPenalties
    names: list[str]
    near: float


def tune_kinds(
    left_out: LeftOut, pieces: list[Piece], algorithm: LBFGSB, smaller: KindLevels | None = None
) -> KindLevels:
    """One penalty for each kind of part.

    Args:
        smaller: the penalties of a model with fewer terms, to begin with; by default the best of a grid with all kinds
            alike.
    """
    _, kind, _, names = grouped(pieces)
    kinds = np.arange(len(names))
    if smaller is None:
        # Degrees of freedom are dear at first: a fit through all rows, whose leave-one-out loss can be small by chance,
        # is no place to begin.
        by_kind = left_out.problem(kind, kinds, left_out.constant)
        best: TunedPenalties | None = None
        for level in (level for level in GRID if level >= left_out.box[0]):
            last = None if best is None else best.w[None]
            here = left_out.evaluate(by_kind, torch.full((len(names),), level, dtype=torch.float64), last)
            if best is not None and here.value > 1.02 * best.value:
                break
            best = here if best is None or here.value < best.value else best
        assert best is not None
        near = best.value
    else:
        near = smaller.tuned.value
        level_of = dict(zip(smaller.names, smaller.tuned.lam.tolist(), strict=True))
        begin = [level_of.get(name, level_of.get("curve", level_of.get("linear", 0.0)) + 2.0) for name in names]
        by_kind = left_out.problem(kind, kinds)
        best = left_out.evaluate(by_kind, torch.tensor(begin, dtype=torch.float64).clamp(*left_out.box))
    return KindLevels(left_out.minimise(kind, kinds, best, 0.0, near, algorithm), names, near)


def tune_each(
    left_out: LeftOut, pieces: list[Piece], strength: float, algorithm: LBFGSB, levels: KindLevels
) -> TunedPenalties:
    """The penalties of all groups, from those of the kinds.

    Args:
        strength: of the tether; inf for one penalty for each kind.
    """
    own, _, kind_of_own, names = grouped(pieces)
    start = levels.tuned
    spread = TunedPenalties(start.lam[torch.from_numpy(kind_of_own)], start.value, start.w, start.outcome)
    if math.isinf(strength) or len(kind_of_own) == len(names):
        return spread
    return left_out.minimise(own, kind_of_own, spread, strength, levels.near, algorithm)
