"""Methods for linear models on folds: the minimiser by linear algebra, and implicit differentiation there."""

from bilevel.methods.linear_models._at_minimiser import LinearModelMethod, MinimiserMethod, Minimum, start_of
from bilevel.methods.linear_models._shared_work import work_is_shared
from bilevel.methods.linear_models.active_set import ActiveSet
from bilevel.methods.linear_models.kernel_equations import KernelEquations
from bilevel.methods.linear_models.newton_left_out import NewtonLeftOut
from bilevel.methods.linear_models.newton_linear import NewtonLinear
from bilevel.methods.linear_models.normal_equations import NormalEquations
from bilevel.methods.linear_models.row_span import RowSpan
from bilevel.methods.linear_models.stale_newton import StaleNewton

__all__ = [
    "ActiveSet",
    "KernelEquations",
    "LinearModelMethod",
    "MinimiserMethod",
    "Minimum",
    "NewtonLeftOut",
    "NewtonLinear",
    "NormalEquations",
    "RowSpan",
    "StaleNewton",
    "start_of",
    "work_is_shared",
]
