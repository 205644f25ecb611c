"""Exact ∇f_T for a quadratic inner objective, at a cost that does not depend on T."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from bilevel import trees
from bilevel.engine.method import Hypergradient, Method
from bilevel.engine.process import Process
from bilevel.errors import BilevelError
from bilevel.methods.spectral.compiled import compile_derivative
from bilevel.methods.spectral.gradients import QuadraticDerivative, Start, differentiate, kept_bytes
from bilevel.methods.spectral.proof import refuse_unless_quadratic
from bilevel.methods.spectral.quadratic import Layout, columns_share_matrix, find_axis, tolerance_of


@dataclass(frozen=True)
class Spectral(Method):
    """w_T = p_T(A) w_0 + q_T(A) b for a quadratic inner objective ½⟨w, A w⟩ − ⟨b, w⟩: the cost is independent of T.

    For gradient descent and heavy ball with constant settings. p_T and q_T are polynomials of the eigenvalues of A, for
    gradient descent p_T(s) = (1 − ηs)^T and q_T = (1 − p_T)/s. The derivative in A is Q (p[sᵢ, sⱼ] ∘ …) Qᵀ with divided
    differences p[sᵢ, sⱼ], which are computed without division, so that repeated or clustered eigenvalues and a singular
    A cause no error.

    Every call proves from its operations that the inner objective is quadratic: ∇L is computed once and must consist of
    sums and products in which w has degree one. This costs a few evaluations of ∇L, whatever T is. Objectives that are
    only piecewise quadratic, such as a squared hinge, are refused, even if the run stays in one piece. So is a
    quadratic that is written with other operations, such as a squared `norm`.

    If w consists of C independent columns that share one matrix A (multi-output ridge), this is detected, and A is
    decomposed once for all columns.

    Args:
        largest: refuse a matrix A with more rows than this.
    """

    largest: int = 4096

    def check(self, process: Process) -> None:
        if process.previous is not None:
            raise BilevelError(
                "Spectral computes a run from its start and cannot continue an earlier one; use Reverse() or Forward() "
                "online."
            )
        if callable(process.bound.task.train):
            raise BilevelError(
                "Spectral needs one quadratic for all steps, but task.train is a function of t. Pass the whole "
                "training set as a batch, or use Reverse()."
            )
        _check_settings(process)

    def prepare(self, process: Process) -> int | None:
        """The axis of w along which columns share one matrix A, if there is one."""
        axis = find_axis(process)
        with torch.no_grad():
            rows = Layout(trees.leaves(process.bound.start()[0]), axis).rows
        if rows > self.largest:
            raise BilevelError(
                f"Spectral would decompose a {rows} × {rows} matrix, and its limit is {self.largest}. Use "
                "Implicit(CG()) or Reverse(), or raise the limit with Spectral(largest=…)."
            )
        return axis

    def __call__(self, process: Process) -> Hypergradient:
        axis, bound = process.check_results.prepared, process.bound
        if axis is not None and not columns_share_matrix(bound, axis):
            axis = process.check_results.prepared = self.prepare(process)
        start = Start.of(bound)
        refuse_unless_quadratic(bound.loss(1), start.spec.unflatten(start.leaves))
        return self._result(process, start, differentiate(bound, process.variables, start, process.steps, axis), axis)

    def compile(self, process: Process, block: int) -> Callable[[Process], Hypergradient]:
        axis, start = process.check_results.prepared, Start.of(process.bound)
        # Compiled code runs the same operations at every call, so one proof is enough.
        refuse_unless_quadratic(process.bound.loss(1), start.spec.unflatten(start.leaves))
        derivative = compile_derivative(process, start, axis)

        def run(process: Process) -> Hypergradient:
            if axis is not None and not columns_share_matrix(process.bound, axis):
                raise BilevelError(
                    "The columns of w shared one matrix A in the task that was compiled, and do not share one in this "
                    "task. Call bilevel.compile(...) with this task."
                )
            start = Start.of(process.bound)
            return self._result(process, start, derivative(process, start), axis)

        return run

    def _result(self, process: Process, start: Start, found: QuadraticDerivative, axis: int | None) -> Hypergradient:
        _refuse_unless_exact(found)
        layout = Layout(found.leaves, axis)
        return self.result(
            process,
            found.value,
            (start.spec.unflatten(found.leaves), ()),
            start.pull_back(found, process.variables),
            # There is no velocity from which a run could continue.
            continues=False,
            peak_memory=kept_bytes(layout, start, process.steps),
            products=layout.products,
        )


def _refuse_unless_exact(found: QuadraticDerivative) -> None:
    """Refuse an L whose quadratic at w_T differs from the one at w_0, for example because a .detach() hides a
    derivative from autograd."""
    if not float(found.misfit) <= tolerance_of(found.misfit) and bool(torch.isfinite(found.value)):
        raise BilevelError(
            "Spectral needs an inner objective that is quadratic in w, but at w_T the gradient of this one is "
            f"{float(found.misfit):.2g} (relative) away from that of its quadratic at w_0. Use Reverse(), or "
            "Implicit() once the inner problem converges."
        )


def _check_settings(process: Process) -> None:
    """The step size and momentum must be single numbers that do not change with t."""
    dynamics = process.bound.dynamics
    form = dynamics.heavy_ball_form(1)
    if form is None:
        raise BilevelError(
            f"Spectral supports gradient descent and heavy ball, not {type(dynamics).__name__}. Use Reverse() with "
            "this dynamics."
        )
    for name, value in zip(("lr", "momentum"), form, strict=True):
        if not isinstance(value, (int, float)) and not (isinstance(value, Tensor) and value.numel() == 1):
            raise BilevelError(
                f"Spectral needs one {name} for all weights, but it was given {trees.describe(value)}. Use Reverse() "
                "for a value per weight."
            )
    ours = type(dynamics).heavy_ball_form.__module__.startswith("bilevel.")
    if ours and not any(callable(getattr(dynamics, f.name)) for f in fields(dynamics)):
        return
    if any(isinstance(value, Tensor) and value.requires_grad for value in form):
        raise BilevelError(
            "Spectral needs settings that do not change with t, but here they are functions of t and learned, so each "
            "step may have its own. Pass the learned value itself instead of a function, or use Reverse()."
        )
    numbers = [float(value) for value in form]
    for t in process.times:
        if [float(value) for value in dynamics.heavy_ball_form(t) or ()] != numbers:
            raise BilevelError(
                f"Spectral needs settings that do not change with t, but they are {numbers} at step 1 and others at "
                f"step {t}. Use Reverse()."
            )
