"""Exact ∇f_T for a quadratic inner objective, at a cost that does not depend on T."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from bilevel import trees
from bilevel.dynamics import DynamicsLike
from bilevel.errors import BilevelError
from bilevel.methods.base import Hypergradient, Method
from bilevel.methods.process import Process
from bilevel.methods.spectral_compiled import differentiate_compiled
from bilevel.methods.spectral_gradients import Found, Start, differentiate, kept_bytes
from bilevel.methods.spectral_proof import refuse_unless_quadratic
from bilevel.methods.spectral_quadratic import Layout, find_axis, still_shares, tolerance_of
from bilevel.methods.spectral_recall import recall, remember
from bilevel.problem import Problem, Task
from bilevel.trees import Tree


@dataclass(frozen=True)
class Spectral(Method):
    """w_T = p_T(A) w_0 + q_T(A) b for a quadratic inner objective ½⟨w, A w⟩ − ⟨b, w⟩: the cost is independent of T.

    For gradient descent and heavy ball with constant settings. p_T and q_T are polynomials of the eigenvalues of A, for
    gradient descent p_T(s) = (1 − ηs)^T and q_T = (1 − p_T)/s. The derivative in A is Q (p[sᵢ, sⱼ] ∘ …) Qᵀ with divided
    differences p[sᵢ, sⱼ], which are computed without a quotient, so that repeated or clustered eigenvalues and singular
    A are harmless.

    That the inner objective is quadratic is read off its operations, at every call: ∇L is computed once and must
    consist of sums and products in which w has degree one. This is certain, and costs a few evaluations of ∇L, whatever
    T is. Objectives that are quadratic in pieces only, such as a squared hinge, are refused, also where the run may
    stay in one piece, and so is a quadratic that is written with other operations, such as a squared `norm`.

    The w of C independent columns that share one matrix A (multi-output ridge) are recognised, and cost one
    eigendecomposition of A.

    Args:
        largest: refuse a matrix A with more rows than this.
        compiled: compile the computation, the objectives included. The first call takes about a quarter of a minute,
            later ones a fraction of the eager time where w is small. What the objectives read besides their arguments
            may change: numbers in closures, globals and attributes are looked up at every call, and the code is
            compiled anew when one is another. Where they read more than that (a dict, an object within an object), both
            values are also compared with those of the compiled code, to rounding; there, a change that is smaller than
            rounding, or one of derivatives and no value, is not noticed. Random numbers are refused.
    """

    largest: int = 4096
    compiled: bool = False

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

    def look(self, process: Process) -> None:
        if "spectral axis" not in process.findings:
            axis = find_axis(process)
            with torch.no_grad():
                rows = Layout(trees.leaves(process.bound.start()[0]), axis).rows
            if rows > self.largest:
                raise BilevelError(
                    f"Spectral would decompose a {rows} × {rows} matrix, and its limit is {self.largest}. Use "
                    "Implicit(CG()) or Reverse(), or raise the limit with Spectral(largest=…)."
                )
            process.findings["spectral axis"] = axis

    def __call__(self, process: Process) -> Hypergradient:
        axis, bound = process.findings["spectral axis"], process.bound
        if axis is not None and not still_shares(bound, axis):
            del process.findings["spectral axis"]
            self.look(process)
            axis = process.findings["spectral axis"]
        start = Start.of(bound)
        code = None
        if self.compiled:
            found, code = differentiate_compiled(process, start, axis)
        else:
            refuse_unless_quadratic(bound.loss(1), start.spec.unflatten(start.leaves))
            found = differentiate(bound, process.variables, start, process.steps, axis)
        _refuse_unless_exact(found)
        layout = Layout(found.leaves, axis)
        result = self.result(
            process,
            found.value,
            (start.spec.unflatten(found.leaves), ()),
            start.pull_back(found, process.variables),
            # There is no velocity to go on from.
            continues=False,
            peak_memory=kept_bytes(layout, start, process.steps),
            products=layout.products,
        )
        # Whether columns share a matrix has to be asked for all data, which the short way does not.
        if code is not None and axis is None:
            remember(process, code, start, (self, process.allow_unused), result.stats)
        return result

    def recall(
        self, problem: Problem, lam: Tree, task: Task, dynamics: DynamicsLike, steps: int, allow_unused: bool
    ) -> Hypergradient | None:
        return recall(problem, lam, task, dynamics, steps, (self, allow_unused)) if self.compiled else None


def _refuse_unless_exact(found: Found) -> None:
    """At the end of the run L is the quadratic that it had at the start: derivatives that autograd was kept from
    seeing, by a .detach() say, make it another one."""
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
            f"Spectral knows gradient descent and heavy ball, not {type(dynamics).__name__}. Use Reverse() with this "
            "dynamics."
        )
    for name, value in zip(("lr", "momentum"), form, strict=True):
        if not isinstance(value, (int, float)) and not (isinstance(value, Tensor) and value.numel() == 1):
            raise BilevelError(
                f"Spectral needs one {name} for all weights, but it was given {trees.describe(value)}. Use Reverse() "
                "for a value per weight."
            )
    if not any(callable(getattr(dynamics, f.name)) for f in fields(dynamics)):
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
