"""The minimiser of a quadratic with an L1 penalty from any start, by a search for the signs of its coefficients."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

STEPS = 2_000
# The number of coefficients that are freed at once.
FREED = 10
# Added to the diagonal, relative to it: with more free coefficients than rows the matrix would be singular.
RIDGE = 1e-12


def feature_sign_search(matrix: Array, linear: Array, l1: Array, w: Array, positive: bool = False) -> Array:
    """argmin of ½⟨w, Aw⟩ − ⟨b, w⟩ + Σ l1_j |w_j| from w, by feature-sign search (Lee, Battle, Raina and Ng, 2007).

    With fixed signs on the support, the minimiser solves a linear system. A step goes towards it, as far as the
    objective falls; coefficients that become zero there leave the support. Where the signs are right, the coefficients
    that violate the optimality conditions most are freed. Every step lowers the objective, so no pattern of
    signs occurs twice.

    Args:
        positive: allow no negative coefficients.

    >>> feature_sign_search(np.eye(3), np.array([3.0, -0.5, -2.0]), np.ones(3), np.zeros(3)).round(6).tolist()
    [2.0, 0.0, -1.0]
    """
    matrix = matrix + np.diag(RIDGE * matrix.diagonal())
    w = np.where(w > 0, w, 0.0) if positive else w.copy()
    signs, freed = np.sign(w), np.zeros(len(w), dtype=bool)
    tolerance = 1e-11 * np.abs(linear).max(initial=0.0)
    for _ in range(STEPS):
        support = np.flatnonzero(signs)
        if len(support):
            block, sign, current = matrix[np.ix_(support, support)], signs[support], w[support]
            target = np.linalg.solve(block, linear[support] - l1[support] * sign)
            step = target - current
            # A coefficient that was freed with others, and would move against its sign, stays at zero.
            wrong = freed[support] & (step * sign <= 0)
            if wrong.any():
                signs[support[wrong]] = 0
                continue
            freed[:] = False
            if (target * sign <= 0).any():
                w[support] = _line_minimiser(current, step, sign, l1[support], block, positive)
                signs[support] = np.sign(w[support])
                continue
            w[support] = target
        slope = linear - matrix @ w
        violation = np.where(signs == 0, (slope if positive else np.abs(slope)) - l1, 0.0)
        worst = np.argsort(-violation)[:FREED]
        freed[worst] = violation[worst] > tolerance
        if not freed.any():
            break
        signs[freed] = np.sign(slope[freed])
    return w


def _line_minimiser(w: Array, step: Array, sign: Array, l1: Array, matrix: Array, positive: bool) -> Array:
    """The minimiser on the segment from w to w + step, which is the minimiser of the objective with fixed signs.

    On the segment the objective is quadratic between the points where a coefficient changes its sign. There its slope
    jumps by 2 l1 |step|.
    """
    crosses = (w + step) * sign <= 0
    crossing = np.where(crosses, -w / np.where(crosses, step, 1.0), np.inf)
    order = np.argsort(crossing)[: int(crosses.sum())]
    if not positive:
        curvature = max(float(step @ matrix @ step), 1e-300)
        jumps = np.cumsum(2 * l1[order] * np.abs(step[order]))
        # The slope just after each change of sign. The minimiser is where it first is not negative, or just before.
        after = (crossing[order] - 1) * curvature + jumps
        rising = np.flatnonzero(after >= 0)
        end = rising[0] if len(rising) else len(order)
        before = jumps[end - 1] if end > 0 else 0.0
        length = 1 - before / curvature
        if end == len(order) or length < crossing[order[end]]:
            return w + length * step
        order = order[end:]
    found = w + crossing[order[0]] * step
    found[order[0]] = 0.0
    return found
