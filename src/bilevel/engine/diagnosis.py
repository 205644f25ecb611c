"""Find out why a number is not finite, by running the process again. A run with finite numbers costs nothing extra."""

from __future__ import annotations

import math
from typing import NoReturn

import torch

from bilevel import trees
from bilevel.engine.curvature import hessian
from bilevel.engine.process import Process, State
from bilevel.errors import DivergenceError
from bilevel.linear_solvers.base import largest_eigenvalue
from bilevel.trees import Tree


def explain_divergence(process: Process) -> NoReturn:
    """Raise the error that names the step, the loss and the likely cause."""
    bound = process.bound
    if process.steps:
        refuse_non_finite_data("inner(w, lam, batch)", bound.batch(process.times[0]))
    refuse_non_finite_data("outer(w, lam, batch)", bound.task.val)
    with torch.no_grad():
        start = state = bound.start()
        loss = None
        for t in process.times:
            before = loss
            loss = float(bound.loss(t)(state[0]))
            if loss != loss or loss in (float("inf"), float("-inf")):
                refuse_non_finite_data(f"step {t}", bound.batch(t))
                _raise(process, start, t, before, f"the inner loss became {loss}")
            state = bound.step(state, t)
            if not trees.all_finite(state):
                _raise(process, start, t, loss, "the iterate became NaN or Inf")
        value = float(bound.outer(state))
    if not math.isfinite(value):
        raise DivergenceError(
            f"The outer objective is {value} at w_T although all {process.steps} inner steps stayed finite (last inner "
            f"loss {loss}). Check it for log(0), 0/0 or overflow.",
            loss=loss,
        )
    raise DivergenceError(
        f"The hypergradient is NaN or Inf although w_T and f_T = {value:.6g} are finite (last inner loss {loss}). A "
        "derivative in the inner or outer objective is not finite: a square root or a norm at 0, or a power at 0, are "
        "the usual places.",
        loss=loss,
    )


def refuse_diverged(process: Process, state: State) -> None:
    """Refuse a last state whose inner loss is a million times that of the start: it is on its way to infinity."""
    with torch.no_grad():
        start, t = process.bound.start(), max(process.times.stop - 1, 1)
        before, after = (float(process.bound.loss(t)(point[0])) for point in (start, state))
    if after > 1e6 * (1 + abs(before)):
        _raise(process, start, t, before, f"the inner loss was {after:.3g}", "at the start")


def refuse_non_finite_data(name: str, batch: Tree) -> None:
    for path, leaf in zip(trees.paths(batch), trees.leaves(batch), strict=True):
        if trees.is_variable(leaf) and not bool(torch.isfinite(leaf).all()):
            rows = torch.nonzero(~torch.isfinite(leaf))
            raise DivergenceError(
                f"The data of {name} has {len(rows)} entries NaN or Inf in batch{path}, the first at index "
                f"{rows[0].tolist()}. Clean or impute them first; nothing was computed.",
                step=0,
            )


def _raise(process: Process, start: State, t: int, loss: float | None, what: str, when: str = "before it") -> NoReturn:
    known = "" if loss is None else f" (the loss {when} was {loss:.6g})"
    raise DivergenceError(
        f"The inner problem diverged: at step {t} of {process.times.stop - 1} {what}{known}. "
        f"{likely_cause(process, start)}",
        step=t,
        loss=loss,
    )


def likely_cause(process: Process, start: State) -> str:
    """Compare the step size with 2/ν at the start."""
    t = process.times.start
    if process.bound.dynamics.equations:
        return (
            "The map moves w away from its fixed point. Use Picard(mixing) with a smaller mixing, Anderson(), or a "
            "dynamics that minimises ½‖w − Φ(w)‖², such as LevenbergMarquardt() or GradientDescent(lr)."
        )
    slope, operator = hessian(process.bound.loss(t), start[0])
    nu = largest_eigenvalue(operator, slope)
    limit = process.bound.dynamics.largest_step(nu, t) if nu > 0 else None
    if limit is None:
        return f"The largest curvature at the start is ν ≈ {nu:.4g}; try a smaller step size."
    lr, most = limit
    if math.isnan(lr):
        return "The step size is NaN: look for a logarithm, a root or a quotient where it is computed."
    if lr >= most:
        return (
            f"The step size {lr:.4g} lies above the limit {most:.4g} set by the largest curvature ν ≈ {nu:.4g}; use a "
            "smaller one."
        )
    return (
        f"The step size {lr:.4g} is below the limit {most:.4g} at the start, so the curvature must grow on the way; "
        "try a smaller one."
    )
