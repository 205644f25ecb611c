"""Inner objectives that declare their structure, so that a method written for it can be used.

A structure is called like any other inner objective, `inner(w, lam, batch)`, and every method works on it. Methods that
know it (`DualDescent` for `LinearClassifiers`, `NormalEquations` for `LeastSquares`, `NewtonLinear` for `LinearModels`)
find it in `problem.inner`. Writing the same objective as a function of your own gives the same numbers and only costs
speed.
"""

from __future__ import annotations

from bilevel.structures.least_squares import LeastSquares
from bilevel.structures.linear_classifiers import LinearClassifiers
from bilevel.structures.linear_models import LinearModels
from bilevel.structures.losses import GammaDeviance, LogLoss, PoissonDeviance, SquaredError
from bilevel.structures.outer_objectives import HeldOutLoss, HeldOutSquares, LeaveOneOut, LeftOutLoss
from bilevel.structures.penalties import FunctionOfLam, GroupPenalties
from bilevel.structures.rows import GramOfRows

__all__ = [
    "FunctionOfLam",
    "GammaDeviance",
    "GramOfRows",
    "GroupPenalties",
    "HeldOutLoss",
    "HeldOutSquares",
    "LeastSquares",
    "LeaveOneOut",
    "LeftOutLoss",
    "LinearClassifiers",
    "LinearModels",
    "LogLoss",
    "PoissonDeviance",
    "SquaredError",
]
