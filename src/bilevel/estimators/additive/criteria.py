"""What the penalties of an additive model minimise: the loss on rows that the model was not fitted to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bilevel.algorithms.lbfgsb import LBFGSB
from bilevel.constraints.box import Box
from bilevel.dynamics.gradient_descent import GradientDescent
from bilevel.engine.method import Method
from bilevel.errors import Outcome
from bilevel.estimators.folds import Array, Folds
from bilevel.estimators.hyperparameters import Grouping, Tether
from bilevel.estimators.rows_of_table import RowsOfTable
from bilevel.estimators.search import SearchRecord
from bilevel.estimators.sums_of_table import SumsOfTable
from bilevel.estimators.tables import FoldedTable, HeldOutScores
from bilevel.hypergradients import hypergradient
from bilevel.methods.linear_models.kernel_equations import KernelEquations
from bilevel.methods.linear_models.newton_left_out import NewtonLeftOut
from bilevel.methods.linear_models.normal_equations import NormalEquations
from bilevel.outer_loop import Iteration, solve
from bilevel.problem import Problem, Task
from bilevel.structures.least_squares import LeastSquares
from bilevel.structures.linear_models import LinearModels
from bilevel.structures.losses import RowLoss, SquaredError
from bilevel.structures.outer_objectives import HeldOutLoss, HeldOutSquares, LeaveOneOut, LeftOutLoss
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
        value: the criterion, without the term for the degrees of freedom.
        inner: the coefficients of every fold, of shape folds × outputs × features, with an intercept if the inner
            problem has one. The leave-one-out loss has one fold, which is fitted to all rows.
        adjoint: the state of the method, from which the evaluation at the next penalties starts.
        tether: the factor of the tether in Σ s · criterion; inf if it keeps one penalty for each kind. None if the
            penalties were not tuned on these rows.
    """

    lam: Tensor
    value: float
    inner: Tensor
    outcome: Outcome | None = None
    adjoint: Any = None
    tether: float | None = None

    @property
    def w(self) -> Tensor:
        """The coefficients, outputs × features, the mean over the folds."""
        return self.inner.mean(0)


class Criterion(ABC):
    """The loss on rows that the model was not fitted to, as a function of the penalties of groups of features.

    Args:
        X: the features.
        outputs: the targets, of shape rows × outputs.
        weight: the positive weight of every row.
        loss: the loss of a row as a function of its scores.
        record: receives the loss, its gradient's norm and the seconds of every evaluation in `minimise`.

    Attributes:
        method: the method for the hypergradients.
        description: how rows are left out, in a few words.
    """

    method: Method
    description: str

    def __init__(
        self, X: Array, outputs: Array, weight: Array, loss: RowLoss, record: SearchRecord | None = None
    ) -> None:
        self.X, self.outputs, self.weight, self.loss = X, outputs, weight, loss
        self.record = SearchRecord() if record is None else record
        self.squares = isinstance(loss, SquaredError)
        self.total = float(weight.sum())
        self.box = BOX if self.squares else LOG_LOSS_BOX

    @property
    def constant(self) -> float:
        """The squared-error loss of the model without features."""
        return 0.5 * float(self.weight @ (self.outputs**2).sum(1)) / self.total

    @abstractmethod
    def problem(self, groups: PenaltyGroups, expected_loss: float | None = None) -> Problem:
        """The bilevel problem with one penalty per group.

        Args:
            expected_loss: an estimate of the loss. It scales the term for the degrees of freedom. None means no such
                term.
        """

    @abstractmethod
    def task(self, strength: float) -> Task:
        """The data, with the strength of the tether."""

    @abstractmethod
    def held_out_scores(self, tuned: TunedPenalties, groups: PenaltyGroups) -> HeldOutScores:
        """The scores of rows, each by a model that was not fitted to it."""

    def penalty(self, groups: PenaltyGroups) -> GroupPenalties:
        """The penalty of every feature as a function of λ."""
        return GroupPenalties(self.X.shape[1], torch.from_numpy(groups.of), PENALTY_UNIT * self.total)

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
        return TunedPenalties(lam, float(result.value), result.inner, adjoint=result.adjoint)

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
            start=start.inner,
            dynamics=GradientDescent(1.0),
            steps=0,
            callbacks=[observe],
            progress=False,
        )
        tuned = self.evaluate(self.problem(groups), solution.outer, solution.inner)
        tuned.outcome, tuned.tether = solution.outcome, strength * start.value
        return tuned


class RowByRow(Criterion):
    """The leave-one-out loss: in closed form for squared errors, by one Newton step for each row for other losses.

    For squared errors, features and targets are taken about their weighted means, and w has no intercept.
    """

    description = "each row left out"

    def __init__(
        self, X: Array, outputs: Array, weight: Array, loss: RowLoss, record: SearchRecord | None = None
    ) -> None:
        super().__init__(X, outputs, weight, loss, record)
        self.mean = np.zeros(outputs.shape[1])
        if self.squares:
            share = self.weight / self.weight.sum()
            self.mean = share @ self.outputs
            self.X, self.outputs = self.X - share @ self.X, self.outputs - self.mean
        parts = (torch.from_numpy(np.array(part, order="C")) for part in (self.X, self.outputs.T, self.weight))
        rows, y, s = parts
        # Whether to solve a system of size rows, not features.
        self.by_rows = self.squares and rows.shape[1] > rows.shape[0]
        self.train: tuple[Any, ...]
        self.val: tuple[Any, ...] = (rows, y, s, s / self.total) if self.squares else (rows, y, s[None])
        if self.squares and not self.by_rows:
            self.train = ((rows.mT @ (s[:, None] * rows))[None], ((s * y) @ rows)[None])
        else:
            self.train = (rows, y, s[None])
        if self.squares:
            self.method = KernelEquations() if self.by_rows else NormalEquations()
        else:
            self.method = NewtonLeftOut(ACCURACY)

    def problem(self, groups: PenaltyGroups, expected_loss: float | None = None) -> Problem:
        size, intercept = self.X.shape[1], not self.squares
        penalty = self.penalty(groups)
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

    def held_out_scores(self, tuned: TunedPenalties, groups: PenaltyGroups) -> HeldOutScores:
        rows, y, s = self.val[:3]
        w = tuned.inner
        if self.squares:
            # Rows are about their mean, so the intercept is zero. It still has a leverage.
            w = torch.cat([w, w.new_zeros(*w.shape[:2], 1)], 2)
        outer = LeftOutLoss(LinearModels(self.loss, self.penalty(groups), True), Tether())
        with torch.no_grad():
            scores = outer.scores(w, tuned.lam, (rows, y, s.reshape(1, -1), None))
        return [(np.arange(len(self.weight)), scores.mT.numpy() + self.mean)]


class FoldByFold(Criterion):
    """The loss on the rows that each fold holds out, of the model that is fitted to the fold's other rows."""

    def __init__(
        self, X: Array, outputs: Array, folds: Folds, loss: RowLoss, record: SearchRecord | None = None
    ) -> None:
        super().__init__(X, outputs, folds.weight, loss, record)
        self.folds, self.description = folds, f"{folds.count} fold{'s' * (folds.count > 1)}"
        # The table's own penalties are not used. The penalties of the problem below depend on the groups.
        one_group = Grouping(np.zeros(X.shape[1], dtype=int))
        self.table: FoldedTable
        if self.squares and X.shape[1] <= X.shape[0]:
            self.table = SumsOfTable(X, outputs, folds, one_group, True)
        else:
            self.table = RowsOfTable(X, outputs, folds, one_group, True, loss)
        self.method = self.table.method(ACCURACY)
        self.data = self.table.task(folds)

    def problem(self, groups: PenaltyGroups, expected_loss: float | None = None) -> Problem:
        penalty, tether = self.penalty(groups), Tether(groups.kinds)
        model = LinearModels(self.loss, penalty, True)
        by_sums = isinstance(self.table, SumsOfTable)
        return Problem(
            LeastSquares(penalty) if by_sums else model,
            HeldOutSquares(tether) if by_sums else HeldOutLoss(model, tether),
            init=lambda lam: self.table.start(self.data),
            check_derivatives=False,
        )

    def task(self, strength: float) -> Task:
        return Task(self.data.train, (*self.data.val[:-1], torch.tensor(strength, dtype=torch.float64)))

    def held_out_scores(self, tuned: TunedPenalties, groups: PenaltyGroups) -> HeldOutScores:
        return self.table.held_out_scores(tuned.inner, self.folds, tuned.lam)
