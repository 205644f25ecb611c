"""A weight per example, for the validation error instead of the validation loss: another outer objective."""

from __future__ import annotations

from referee.solvers import bilevel_cleaning


class Solver(bilevel_cleaning.Solver):
    """The cross-entropy of twice the scores, on the same validation set.

    The penalty of the referee's inner objective keeps the scores small, so that its outer objective rewards larger
    scores more than right ones. Twice the scores is closer to the error. The inner objective is the referee's.
    """

    name = "bilevel SPG, NewtonLinear, twice the scores"
    sharpness = 2.0
