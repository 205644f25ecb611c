"""A case as a `bilevel.Problem`, for any of the package's methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bilevel as bl
from harness.contract import Case, Run
from problems.in_torch import in_torch


def problem_of(case: Case) -> tuple[bl.Problem, Any, bl.Task]:
    """The problem, λ and the task."""
    data = in_torch(case)
    problem = bl.Problem(data.inner, data.outer, init=lambda lam: list(data.start))
    return problem, data.lam, bl.Task(data.train, data.val)


def with_method(method: bl.Method) -> Callable[[Case], Run]:
    """The `prepare` of a contestant that differentiates gradient descent by this method."""

    def prepare(case: Case) -> Run:
        problem, lam, task = problem_of(case)
        dynamics = bl.GradientDescent(case.lr)
        return lambda: bl.hypergradient(problem, lam, task, dynamics=dynamics, steps=case.steps, method=method).grad

    return prepare


def compiled(method: bl.Method) -> Callable[[Case], Run]:
    """The `prepare` of a contestant that differentiates gradient descent by the compiled form of this method."""

    def prepare(case: Case) -> Run:
        problem, lam, task = problem_of(case)
        fast = bl.compile(problem, lam, task, dynamics=bl.GradientDescent(case.lr), steps=case.steps, method=method)
        return lambda: fast(lam, task).grad

    return prepare
