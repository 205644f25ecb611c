"""The criterion by the engine: `Implicit` with conjugate gradients, where matrices would be too large."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from bilevel.estimators.criterion import Criterion, Evaluation
from bilevel.estimators.folds import Array, Folds
from bilevel.estimators.linear_problem import LinearProblem
from bilevel.estimators.newton import NewtonCG
from bilevel.hypergradients import hypergradient
from bilevel.linear_solvers.cg import CG
from bilevel.methods.implicit import Implicit
from bilevel.problem import Problem, Task


class EngineCriterion(Criterion):
    """Every evaluation is a warm-started `hypergradient(..., method=Implicit(CG()))` of one problem for all folds."""

    def __init__(self, linear: LinearProblem, intercept: Callable[[Array], Array], tol: float = 1e-7) -> None:
        self.linear, self.folds, self.intercept, self.tol = linear, linear.folds, intercept, tol
        self.unit = linear.unit()
        self.problem, self.task = linear.problem(self.unit), linear.task
        self.w: Tensor | None = None
        self.adjoint: Tensor | None = None
        rows, features = linear.X.shape
        self.method = (
            f"Implicit(CG()) of the engine, warm-started, with products with X ({rows} × {features}) only: factorising "
            "a matrix would cost more."
        )

    def restricted(self, folds: Folds) -> Self:
        return type(self)(replace(self.linear, folds=folds), self.intercept, self.tol)

    def evaluate(self, log_alpha: Array) -> Evaluation:
        lam = torch.from_numpy(log_alpha)
        unit = self.unit(lam)[:, None]
        found = hypergradient(
            self.problem,
            lam,
            self.task,
            dynamics=NewtonCG(),
            steps=1,
            method=Implicit(CG(tol=self.tol, max_iter=1000)),
            start=None if self.w is None else self.w / unit,
            adjoint=self.adjoint,
        )
        self.w, self.adjoint = found.inner * unit, found.adjoint
        return Evaluation(float(found.value), found.grad.numpy())

    def refit(self, log_alpha: Array) -> tuple[Array, Array]:
        everything = np.ones((1, self.folds.train.shape[1]), dtype=bool)
        all_rows = self.restricted(replace(self.folds, train=everything, val=everything))
        all_rows.evaluate(log_alpha)
        assert all_rows.w is not None
        w = all_rows.w[0].numpy()
        features = len(w) - self.linear.free
        return w[:features], w[features:].sum(0) if self.linear.free else self.intercept(w)

    def bilevel_problem(self, log_alpha: Array) -> tuple[Problem, Any, Task, Any, dict[str, Any]]:
        self.evaluate(log_alpha)
        return self.linear.problem(), torch.from_numpy(log_alpha), self.task, self.w, {"products": 30}
