"""Test batteries for dynamics, methods, solvers, constraints, algorithms and learners: the library's own and yours."""

from typing import Any

from bilevel.testing.algorithms import check_algorithm
from bilevel.testing.check_problem import ProblemReport, check_problem
from bilevel.testing.constraints import check_constraint
from bilevel.testing.differences import central_differences, relative_error
from bilevel.testing.dynamics import check_dynamics
from bilevel.testing.methods import check_method
from bilevel.testing.references import BatteryCase, battery_cases
from bilevel.testing.solvers import check_solver

__all__ = [
    "BatteryCase",
    "ProblemReport",
    "battery_cases",
    "central_differences",
    "check_algorithm",
    "check_constraint",
    "check_dynamics",
    "check_learner",
    "check_method",
    "check_problem",
    "check_solver",
    "relative_error",
]


def __getattr__(name: str) -> Any:
    """`check_learner` is imported when it is first used: it needs data sets and networks."""
    if name == "check_learner":
        from bilevel.testing.learners import check_learner

        return check_learner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
