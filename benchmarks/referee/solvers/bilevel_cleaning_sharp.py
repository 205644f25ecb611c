"""One weight per example, with an outer objective that is closer to the validation error."""

from __future__ import annotations

from referee.solvers import bilevel_cleaning


class Solver(bilevel_cleaning.Solver):
    """The cross-entropy of twice the scores, on the same validation set.

    The penalty of the referee's inner objective keeps the scores small. So its outer objective rewards larger scores
    more than correct ones. With twice the scores, the outer objective is closer to the error. The inner objective is
    the referee's.
    """

    name = "bilevel SPG, NewtonLinear, twice the scores"
    sharpness = 2.0
