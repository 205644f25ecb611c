"""Newton's method by conjugate gradients, as a step that the engine can run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bilevel.dynamics.base import Loss
from bilevel.linear_solvers.cg import CG
from bilevel.methods.curvature import hessian


@dataclass(frozen=True)
class NewtonCG:
    """w ← w − s·H⁻¹∇L(w), with s halved until L falls enough; where ∇L is small already, w stays.

    To be used with `Implicit`, which looks at the minimiser and not at the steps towards it.

    Args:
        tol: stop where the decrease that Newton's model promises is this small relative to L.
    """

    tol: float = 1e-12

    def __call__(self, loss: Loss, w: Tensor, state: Any, t: int) -> tuple[Tensor, Any]:
        slope, operator = hessian(loss, w)
        with torch.no_grad():
            value = float(loss(w))
            if not float(slope.norm()) > 0:
                return w, state
            # Far from the minimiser a rough direction is good enough; near it CG's own tolerance takes over.
            direction = CG(tol=1e-2 if t == 1 else 1e-4, max_iter=200).solve(operator, slope).x
            promised = float(torch.dot(slope, direction))
            if promised <= self.tol * abs(value):
                return w, state
            size = 1.0
            while size > 1e-6:
                there = w - size * direction.reshape(w.shape)
                if float(loss(there)) <= value - 1e-4 * size * promised:
                    return there, state
                size /= 2
        return w, state
