"""The batteries that every dynamics, method, linear solver and constraint passes, for you to run on yours."""

from bilevel.testing.check_problem import ProblemReport, check_problem
from bilevel.testing.constraints import check_constraint
from bilevel.testing.differences import central_differences, relative_error
from bilevel.testing.dynamics import check_dynamics
from bilevel.testing.methods import check_method
from bilevel.testing.references import Pair, pairs
from bilevel.testing.solvers import check_solver

__all__ = [
    "Pair",
    "ProblemReport",
    "central_differences",
    "check_constraint",
    "check_dynamics",
    "check_method",
    "check_problem",
    "check_solver",
    "pairs",
    "relative_error",
]
