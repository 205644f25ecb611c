"""Tunes all penalties of an additive model together, by hypergradients of its leave-one-out loss."""

from __future__ import annotations

import math
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
from bilevel.estimators.hyperparameters import Tether
from bilevel.estimators.search import SearchRecord
from bilevel.hypergradients import hypergradient
from bilevel.methods.linear_models.kernel_equations import KernelEquations
from bilevel.methods.linear_models.newton_left_out import NewtonLeftOut
from bilevel.methods.linear_models.normal_equations import NormalEquations
from bilevel.outer_loop import Iteration, solve
from bilevel.problem import Problem, Task
from bilevel.structures.least_squares import LeastSquares
from bilevel.structures.linear_models import LinearModels
from bilevel.structures.losses import RowLoss, SquaredError
from bilevel.structures.outer_objectives import LeaveOneOut, LeftOutLoss
from bilevel.structures.penalties import GroupPenalties

# Penalties are in this unit, relative to the total weight. A log penalty of 0 means a prior variance of 100 times the
# variance of a mean over all rows.
PENALTY_UNIT = 0.01
# The range of log penalties.
BOX = (-7.0, 12.0)
# The range for a log-loss. At smaller penalties classes may be almost separable, and then one Newton step is a poor
# approximation of the fit without a row.
LOG_LOSS_BOX = (-3.0, 12.0)
# The penalty per degree of freedom that is added to the leave-one-out loss, relative to the loss. Without it, many
# penalties can overfit the leave-one-out loss.
FREEDOM = 0.15
# The relative accuracy of the coefficients of a log-loss before the last Newton step, which improves it much.
ACCURACY = 1e-4
# The log penalties that are tried first.
GRID = (9.0, 7.0, 5.0, 3.0, 1.0, -1.0, -3.0)


@dataclass(frozen=True, eq=False)
class PenaltyGroups:
    """Groups of features that share a penalty: the group `of` every feature, and one of the `kinds` for every group.

    The tether pulls the penalties of one kind towards each other.
    """

    of: Array
    kinds: Array


@dataclass
class TunedPenalties:
    """Tuned penalties, and the model at these penalties.

    Attributes:
        lam: the log penalty of every group of features.
        value: the leave-one-out loss, without the term for the degrees of freedom.
        w: coefficients of shape outputs × features, with an intercept unless the loss is squared errors.
        adjoint: the state of the method, from which the evaluation at the next penalties starts.
    """

    lam: Tensor
    value: float
    w: Tensor
    outcome: Outcome | None = None
    adjoint: Any = None


@dataclass
class Criterion:
    """The leave-one-out loss of the rows of a matrix, as a function of the penalties of groups of features.

    Args:
        X: the features. For squared errors, they and the targets are taken about their weighted means.
        outputs: the targets, of shape rows × outputs.
        weight: the positive weight of every row.
        loss: the loss of a row as a function of its scores.
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
        # Whether to solve a system of size rows, not features.
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
        """The squared-error loss of the model without features."""
        return 0.5 * float(self.weight @ (self.outputs**2).sum(1)) / self.total

    @property
    def method(self) -> Method:
        if not self.squares:
            return NewtonLeftOut(ACCURACY)
        return KernelEquations() if self.by_rows else NormalEquations()

    def problem(self, groups: PenaltyGroups, expected_loss: float | None = None) -> Problem:
        """The bilevel problem with one penalty per group.

        Args:
            expected_loss: an estimate of the loss. It scales the term for the degrees of freedom. None means no such
                term.
        """
        size, intercept = self.X.shape[1], not self.squares
        penalty = GroupPenalties(size, torch.from_numpy(groups.of), PENALTY_UNIT * self.total)
        model = LinearModels(self.loss, penalty, intercept)
        inner = LeastSquares(penalty) if self.squares and not self.by_rows else model
        tether = Tether(groups.kinds)
        # Relative to the variance of a row's error, which is twice the squared-error loss. A log-loss needs no scaling.
        price = 0.0 if expected_loss is None else FREEDOM * (2 * expected_loss if self.squares else 1)
        outer = LeaveOneOut(penalty, tether, price) if self.squares else LeftOutLoss(model, tether, price)
        shape = (1, self.outputs.shape[1], size + intercept)
        return Problem(inner, outer, init=lambda lam: lam.new_zeros(shape), check_derivatives=False)

    def task(self, strength: float) -> Task:
        return Task(self.train, (*self.val, torch.tensor(strength, dtype=torch.float64)))

    def evaluate(
        self, problem: Problem, lam: Tensor, start: Tensor | None = None, adjoint: Any = None
    ) -> TunedPenalties:
        result = hypergradient(
            problem,
            lam,
            self.task(0.0),
            method=self.method,
            start=start,
            adjoint=adjoint,
            dynamics=GradientDescent(1.0),
            steps=0,
        )
        return TunedPenalties(lam, float(result.value), result.inner[0], adjoint=result.adjoint)

    def minimise(
        self,
        groups: PenaltyGroups,
        start: TunedPenalties,
        strength: float,
        expected_loss: float,
        algorithm: LBFGSB,
    ) -> TunedPenalties:
        """The λ that minimises the loss, the term for the degrees of freedom and the tether, from `start`.

        The strength of the tether is relative to the loss at the start.
        """
        tether_weight = strength * start.value / self.total

        def observe(here: Iteration) -> None:
            self.record.add(float(here.hypergradient.value), float(here.hypergradient.grad.norm()))

        solution = solve(
            self.problem(groups, expected_loss),
            start.lam,
            self.task(tether_weight),
            method=self.method,
            algorithm=algorithm,
            constraint=Box(*self.box),
            iterations=10**9,
            start=start.w[None],
            dynamics=GradientDescent(1.0),
            steps=0,
            callbacks=[observe],
            progress=False,
        )
        tuned = self.evaluate(self.problem(groups), solution.outer, solution.inner)
        tuned.outcome = solution.outcome
        return tuned


def grouped(pieces: list[Piece]) -> tuple[PenaltyGroups, PenaltyGroups, list[str]]:
    """One penalty for each part of a term; one penalty for each kind of part; and the names of the kinds."""
    names: list[str] = list(dict.fromkeys(piece.kind for piece in pieces))
    kind_of = {piece.penalty: names.index(piece.kind) for piece in pieces}
    part = np.zeros(max(piece.where.stop for piece in pieces), dtype=int)
    for piece in pieces:
        part[piece.where] = piece.penalty
    kinds = np.array([kind_of[k] for k in range(len(kind_of))])
    return PenaltyGroups(part, kinds), PenaltyGroups(kinds[part], np.arange(len(names))), names


@dataclass
class KindLevels:
    """One penalty for each kind of part, tuned.

    Attributes:
        tuned: the result. Its λ has one entry for each of `names`.
        expected_loss: an estimate of the loss of a good model, which scales the term for the degrees of freedom.
    """

    tuned: TunedPenalties
    names: list[str]
    expected_loss: float


def tune_kinds(
    criterion: Criterion, pieces: list[Piece], algorithm: LBFGSB, smaller: KindLevels | None = None
) -> KindLevels:
    """One penalty for each kind of part.

    Args:
        smaller: the penalties of a model with fewer terms, to start from. None starts from the best point of a grid
            with the same penalty for all kinds.
    """
    _, by_kind, names = grouped(pieces)
    if smaller is None:
        # The term for the degrees of freedom is large here, so that the search does not start from a fit that
        # interpolates all rows. Such a fit can have a small leave-one-out loss by chance.
        problem = criterion.problem(by_kind, criterion.constant)
        best: TunedPenalties | None = None
        for level in (level for level in GRID if level >= criterion.box[0]):
            last = (None, None) if best is None else (best.w[None], best.adjoint)
            here = criterion.evaluate(problem, torch.full((len(names),), level, dtype=torch.float64), *last)
            if best is not None and here.value > 1.02 * best.value:
                break
            best = here if best is None or here.value < best.value else best
        assert best is not None
        expected_loss = best.value
    else:
        expected_loss = smaller.tuned.value
        level_of = dict(zip(smaller.names, smaller.tuned.lam.tolist(), strict=True))
        first = [level_of.get(name, level_of.get("curve", level_of.get("linear", 0.0)) + 2.0) for name in names]
        lam = torch.tensor(first, dtype=torch.float64).clamp(*criterion.box)
        best = criterion.evaluate(criterion.problem(by_kind), lam)
    return KindLevels(criterion.minimise(by_kind, best, 0.0, expected_loss, algorithm), names, expected_loss)


def tune_each(
    criterion: Criterion, pieces: list[Piece], strength: float, algorithm: LBFGSB, levels: KindLevels
) -> TunedPenalties:
    """Tune one penalty per group, from the penalties of the kinds.

    Args:
        strength: the strength of the tether; inf keeps one penalty per kind.
    """
    by_part, _, names = grouped(pieces)
    start = levels.tuned
    expanded = TunedPenalties(start.lam[torch.from_numpy(by_part.kinds)], start.value, start.w, start.outcome)
    if math.isinf(strength) or len(by_part.kinds) == len(names):
        return expanded
    return criterion.minimise(by_part, expanded, strength, levels.expected_loss, algorithm)
