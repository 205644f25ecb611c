"""The batteries that every dynamics, method, linear solver and constraint passes, for you to run on yours."""

from bilevel.testing.batteries import check_constraint, check_dynamics, check_method, check_solver
from bilevel.testing.check_problem import ProblemReport, check_problem
from bilevel.testing.differences import central_differences, relative_error

__all__ = [
    "ProblemReport",
    "central_differences",
    "check_constraint",
    "check_dynamics",
    "check_method",
    "check_problem",
    "check_solver",
    "relative_error",
]
