"""Newton's method by conjugate gradients, as one step that the engine can run."""

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
    """w ← the minimiser of L, by w ← w − s·H⁻¹∇L(w) with s halved until L falls enough.

    To be used with `Implicit`, which looks at the minimiser and not at the way to it.

    Args:
        tol: the last step is the one that promises to lower L by less than this, relatively. Convergence is quadratic
            there, so what is left is about the square of it.
        max_iter: the most steps.
    """

    tol: float = 1e-10
    max_iter: int = 50

    def __call__(self, loss: Loss, w: Tensor, state: Any, t: int) -> tuple[Tensor, Any]:
        for iteration in range(self.max_iter):
            slope, operator = hessian(loss, w)
            if not float(slope.norm()) > 0:
                break
            # A rough direction is good enough for the first step.
            direction = CG(tol=1e-1 if iteration == 0 else 1e-5, max_iter=500).solve(operator, slope).x
            promised, direction = float(torch.dot(slope, direction)), direction.reshape(w.shape)
            with torch.no_grad():
                value = float(loss(w))
                if promised <= self.tol * abs(value) and iteration > 0:
                    return w - direction, state
                size = 1.0
                while float(loss(w - size * direction)) > value - 1e-4 * size * promised:
                    size /= 2
                    if size < 1e-8:
                        return w, state
                w = w - size * direction
        return w, state
