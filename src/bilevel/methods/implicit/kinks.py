"""Warn of a kink of the fixed-point map: at a degenerate active set, f has no derivative."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from bilevel import trees
from bilevel.errors import BilevelWarning
from bilevel.linear_solvers.base import random_directions
from bilevel.trees import Tree

# A slope that changes by more than this between w − d and w + d counts as a kink.
JUMP = 1e-2


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
