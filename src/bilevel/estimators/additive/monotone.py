"""Monotone effects: the fit under linear constraints, by its dual problem."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from bilevel.errors import BilevelError
from bilevel.estimators.additive.columns import position
from bilevel.estimators.additive.reduction import Reduction
from bilevel.estimators.additive.terms import NumericTerm
from bilevel.estimators.folds import Array
from bilevel.methods.linear_models.newton_linear import PenalisedRows

# A curve is first constrained at `POINTS` points. A grid of `FINE` points finds further constraints, for at most
# `ROUNDS` rounds. `STEPS` is the largest number of Newton steps of a fit.
POINTS, FINE, ROUNDS, STEPS = 40, 400, 10, 30

# Each row times the coefficients is an increment of a constrained curve between neighbouring points.
Rows = Array


def increments(term: NumericTerm, sign: int, points: int) -> Array:
    """Differences of the features between neighbouring points of a grid, times the sign of the slope.

    The grid extends beyond the range of the training rows. Curves are linear there, so they are monotone everywhere.
    """
    low, high = term.range
    margin = 0.01 * (high - low)
    grid = np.linspace(low - margin, high + margin, points)
    # The effect of a missing value is constant, so its increments are zero.
    return sign * np.diff(np.hstack(term.features(grid)), axis=0)


def constrained(rows: PenalisedRows, w: Array, coarse: Rows, fine: Rows) -> Array:
    """The w that minimises the penalised loss of one output subject to `fine @ w` ≥ 0.

    Sequential quadratic programming: each Newton model is minimised under the constraints by non-negative least squares
    in its dual variables. Constraints of the fine grid are added to the coarse ones when a solution violates them.
    """
    # Relative to the curves without constraints, because a constrained curve may be constant.
    active, tolerance = coarse, 1e-9 * float(np.abs(fine @ w).max())
    for _ in range(ROUNDS):
        w = _minimised(rows, w, active)
        violated = fine @ w < -tolerance
        if not violated.any():
            return w
        active = np.vstack([active, fine[violated]])
    raise BilevelError(
        f"No monotone curve was found on {FINE} points in {ROUNDS} rounds. Leave one column out of monotone=, or scale "
        "the target."
    )


def _minimised(rows: PenalisedRows, w: Array, constraints: Rows) -> Array:
    shape = (1, 1, -1)

    def value(at: Array) -> float:
        point = torch.from_numpy(at).reshape(shape)
        return float(rows.values(point, rows.scores(point))[0])

    # The line search needs a feasible start. Zero effects are feasible.
    if not (constraints @ w >= 0).all():
        w = np.where(np.abs(constraints).sum(0) > 0, 0.0, w)
    for _ in range(STEPS):
        point = torch.from_numpy(w).reshape(shape)
        scores = rows.scores(point)
        hessian, slope = rows.hessians(scores)[0].numpy(), rows.slope(point, scores).reshape(-1).numpy()
        target = _projected(hessian, w - np.linalg.solve(hessian, slope), constraints)
        step = target - w
        here, size, predicted = value(w), 1.0, float(-slope @ step)
        while value(w + size * step) > here - 1e-4 * size * max(predicted, 0.0) and size > 1e-8:
            size /= 2
        if size <= 1e-8:
            return w
        w = w + size * step
        if predicted <= 1e-12 * max(abs(here), 1e-300):
            return w
    return w


def _projected(hessian: Array, w: Array, constraints: Rows) -> Array:
    """The v with constraints @ v ≥ 0 that is nearest to w in the norm of the Hessian: v = w + H⁻¹ Cᵀ μ with μ ≥ 0."""
    root = np.linalg.cholesky(hessian)
    scaled = np.linalg.solve(root, constraints.T)
    units = np.maximum(np.linalg.norm(scaled, axis=0), 1e-300)
    multipliers, _ = nnls(scaled / units, -root.T @ w, maxiter=50 * len(constraints))
    return w + np.linalg.solve(root.T, (scaled / units) @ multipliers)


def lift(w: Array, term: Any, sign: int, reduction: Reduction, where: slice | None) -> None:
    """Raise a slope in place until the curve is monotone between the points of the fine grid, by about 1e-6 of it."""
    if where is None or reduction.rotation is not None:
        return
    rises = increments(term, sign, 20 * FINE)
    worst = float((rises @ w[where] / (sign * rises[:, 0])).min())
    w[where.start] += sign * max(-worst, 0.0)


def signs(monotone: object, names: list[str]) -> dict[int, int]:
    """The columns that `monotone` names, with 1 for a rising and −1 for a falling effect."""
    if monotone is None:
        return {}
    if not isinstance(monotone, dict) or not all(sign in (1, -1) for sign in monotone.values()):
        raise BilevelError(
            f"monotone={monotone!r} is not possible. Pass a dict from columns to 1 (rising) or -1 (falling), such as "
            "{'age': 1}."
        )
    return {position(key, "monotone", names): int(sign) for key, sign in monotone.items()}
