"""Kinks at w_T: refuse those of the inner objective, warn of those of the fixed-point map."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from bilevel import trees
from bilevel.errors import BilevelError, BilevelWarning
from bilevel.linear_solvers.base import random_directions
from bilevel.trees import Tree

# A slope that changes by more than this between w − d and w + d counts as a kink.
JUMP = 1e-2
# The minimiser on a line counts as unexpectedly near if it is nearer than this share of what the curvature says.
NEAR = 0.3


@torch.no_grad()
def refuse_kink(
    slope_at: Callable[[Tensor], Tensor], w: Tensor, slope: Tensor, product: Callable[[Tensor], Tensor]
) -> None:
    """Refuse a w_T that is not at rest and lies beside a kink of L: a minimiser at the kink would move with it.

    On the line from w_T against the slope g, a quadratic L has its minimum after ‖g‖²/⟨g, ∇²L g⟩ steps of g. Beside a
    kink the slope changes sign much earlier, and jumps on the way. The jump is found by halving: the change of a smooth
    slope is halved too, a jump is not. It costs a product and a gradient; more if the slope changes its sign early.
    """
    square, bend = float(slope @ slope), float(slope @ product(slope))
    eps = torch.finfo(slope.dtype).eps
    size = float(w.norm()) or 1.0
    if not bend > 0 or not square**1.5 > max(1e-6, 100 * eps) * size * bend:
        return  # w_T has converged, or has no minimum to converge to

    def at(distance: float) -> Tensor:
        return slope_at(w - distance * slope)

    low, high = 0.0, NEAR * square / bend
    before, after = slope, at(high)
    if not float(after @ slope) < 0:
        return
    # The weight whose slope changes most.
    i = int((after - before).abs().argmax())
    whole, halvings = float((after - before)[i].abs()), 30 if eps < 1e-12 else 12
    for _ in range(halvings):
        middle = (low + high) / 2
        between = at(middle)
        if float((between - before)[i].abs()) > float((after - between)[i].abs()):
            high, after = middle, between
        else:
            low, before = middle, between
    jump = float((after - before)[i].abs())
    if jump > 16 * 0.5**halvings * whole and jump > 1e-3 * whole:
        raise BilevelError(
            f"Implicit() differentiates ∇L = 0, but the inner objective has a kink at a distance of "
            f"{low * square**0.5:.2g} from w_T: entry {i} of ∇L jumps by {jump:.2g} there, and ‖∇L‖ is still "
            f"{square**0.5:.2g}. If the minimiser lies at the kink, it moves with it, which second derivatives do not "
            "show. Write the term with the kink (an absolute value, a hinge, a maximum) as the penalty of a proximal "
            "dynamics, such as ISTA(lr, L1(…)); or make it smooth; or use Reverse(), which differentiates the steps. "
            "If only the steps are too few, take more of them; or pass Implicit(check_kinks=False) if an approximation "
            "is enough, as for a network with ReLUs."
        )


@torch.no_grad()
def warn_of_kinks(step: Callable[[Tree], Tree], w: Tree) -> None:
    """Compare Φ(w + d) + Φ(w − d) with 2Φ(w) for a small d without zero entries: for a smooth Φ the difference is
    of order d².

    Only in float64: in float32 the smallest d that rounding allows crosses kinks that do not matter.
    """
    points, spec = trees.flatten(w)
    if any(point.dtype != torch.float64 for point in points):
        return
    vector = trees.to_vector(points)

    def image(x: Tensor) -> Tensor:
        return trees.to_vector(trees.leaves(step(spec.unflatten(trees.from_vector(x, points)))))

    centre = image(vector)
    scale = float(vector.abs().max()) or 1.0
    # Kinks within this distance of w are found. It is at least ten times what one more step changes in w.
    reach = max(1e-6 * scale, 10 * float((centre - vector).abs().max()))
    if not reach < 1e-3 * scale:
        return
    # Signs, and no zeros, so that a kink in any single weight is crossed.
    direction = reach * random_directions(1, vector, seed=11)[0].sign()
    jumps = (image(vector + direction) + image(vector - direction) - 2 * centre).abs() / reach
    if bool(jumps.max() > JUMP):
        where = int(jumps.argmax())
        warnings.warn(
            f"The fixed point that Implicit differentiates has a kink within {reach:.1g} of w_T: the slope of the step "
            f"jumps by {float(jumps[where]):.2g} in entry {where} of w. A constraint or a threshold is just active "
            "there, with a multiplier of zero (a degenerate active set), so f has no derivative, and the result is "
            "the derivative on one side. Move λ a little, or add a smooth penalty.",
            BilevelWarning,
            stacklevel=4,
        )
