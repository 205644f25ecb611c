"""Why a number stopped being finite: found by running again, so that a run that goes well pays nothing for it."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from bilevel import trees
from bilevel.dynamics import gradient
from bilevel.errors import DivergenceError
from bilevel.linear_solvers.base import Operator, largest_eigenvalue
from bilevel.methods.process import Process, State


def explain_divergence(process: Process) -> NoReturn:
    """Raise the error that names the step, the loss and the likely cause."""
    bound = process.bound
    with torch.no_grad():
        start = state = bound.start()
        loss = None
        for t in process.times:
            before = loss
            loss = float(bound.loss(t)(state[0]))
            if loss != loss or loss in (float("inf"), float("-inf")):
                _raise(process, start, t, before, f"the inner loss became {loss}")
            state = bound.step(state, t)
            if not trees.all_finite(state):
                _raise(process, start, t, loss, "the iterate became NaN or Inf")
        value = float(bound.outer(state))
    if not torch.isfinite(torch.tensor(value)):
        raise DivergenceError(
            f"The outer objective is {value} at w_T although all {process.steps} inner steps stayed finite (last inner loss {loss}). "
            "Check it for log(0), 0/0 or overflow.",
            loss=loss,
        )
    raise DivergenceError(
        f"The hypergradient is NaN or Inf although w_T and f_T = {value:.6g} are finite (last inner loss {loss}). A derivative in the inner or outer objective is "
        "not finite: a square root or a norm at 0, or a power at 0, are the usual places.",
        loss=loss,
    )


def _raise(process: Process, start: State, t: int, loss: float | None, what: str) -> NoReturn:
    known = "" if loss is None else f" (the loss before it was {loss:.6g})"
    raise DivergenceError(
        f"The inner problem diverged: at step {t} of {process.times.stop - 1} {what}{known}. {likely_cause(process, start)}", step=t, loss=loss
    )


def likely_cause(process: Process, start: State) -> str:
    """Hold the step size against 2/ν at the start."""
    nu = largest_curvature(process, start)
    limit = step_limit(process, nu)
    if limit is None:
        return f"The largest curvature at the start is ν ≈ {nu:.4g}; try a smaller step size."
    lr, most = limit
    if lr >= most:
        return f"The step size {lr:.4g} lies above the limit {most:.4g} set by the largest curvature ν ≈ {nu:.4g}; use a smaller one."
    return f"The step size {lr:.4g} is below the limit {most:.4g} at the start, so the curvature must grow on the way; try a smaller one."


def step_limit(process: Process, nu: float, t: int | None = None) -> tuple[float, float] | None:
    """The largest step size in use, and the one that a quadratic with curvature ν allows: 2(1 + momentum)/ν."""
    form = process.bound.dynamics.heavy_ball_form(process.times.start if t is None else t)
    if form is None or not nu > 0:
        return None
    lr = max(float(torch.as_tensor(x).max()) for x in trees.leaves(form[0]))
    momentum = min(float(torch.as_tensor(x).min()) for x in trees.leaves(form[1]))
    return lr, 2 * (1 + momentum) / nu


def hessian(process: Process, state: State, t: int | None = None) -> tuple[Operator, list[Tensor]]:
    """∇²_w L at a state, as products with vectors, and the points it was taken at."""
    points, spec = trees.flatten(state[0])
    points = [point.detach().requires_grad_() for point in points]
    with torch.enable_grad():
        slope = trees.leaves(gradient(process.bound.loss(process.times.start if t is None else t), spec.unflatten(points)))
    heads = [index for index, part in enumerate(slope) if part.requires_grad]

    def product(vector: Tensor) -> Tensor:
        pieces = trees.from_vector(vector, points)
        outputs, cotangents = [slope[i] for i in heads], [pieces[i] for i in heads]
        parts = torch.autograd.grad(outputs, points, cotangents, retain_graph=True, allow_unused=True) if heads else [None] * len(points)
        return trees.to_vector([torch.zeros_like(p) if g is None else g for p, g in zip(points, parts, strict=True)])

    return Operator(product, symmetric=True), points


def largest_curvature(process: Process, state: State) -> float:
    operator, points = hessian(process, state)
    return largest_eigenvalue(operator, trees.to_vector(points).detach())
