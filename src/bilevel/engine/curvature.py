"""The curvature of the objectives at a state, matrix-free, and the step sizes that it allows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bilevel import trees
from bilevel.dynamics import Dynamics, gradient
from bilevel.dynamics.base import largest
from bilevel.linear_solvers.base import Operator
from bilevel.trees import Tree


def hessian(objective: Callable[[Tree], Tensor], w: Tree) -> tuple[Tensor, Operator]:
    """∇ and ∇² of an objective at w, as a vector and as products with vectors."""
    points, spec = trees.flatten(w)
    points = [point.detach().requires_grad_() for point in points]
    with torch.enable_grad():
        slope = trees.leaves(gradient(objective, spec.unflatten(points)))
    heads = [index for index, part in enumerate(slope) if part.requires_grad]

    def product(vector: Tensor) -> Tensor:
        if not heads:
            return torch.zeros_like(vector)
        pieces = trees.from_vector(vector, points)
        parts = torch.autograd.grad(
            [slope[i] for i in heads], points, [pieces[i] for i in heads], retain_graph=True, allow_unused=True
        )
        return trees.to_vector([torch.zeros_like(p) if g is None else g for p, g in zip(points, parts, strict=True)])

    return trees.to_vector(slope).detach(), Operator(product, symmetric=True)


def contraction_rate(dynamics: Dynamics, mu: float, nu: float, t: int) -> float | None:
    """The factor by which the distance to the minimiser shrinks per step in the long run, for curvatures in [μ, ν]
    (Remark 3.3)."""
    form = dynamics.heavy_ball_form(t)
    if form is None or any(trees.size(x) > 1 or isinstance(x, dict) for x in form):
        return None
    lr, momentum = (largest(x) for x in form)
    # For an eigenvalue s, the rate z solves z² − (1 + momentum − lr·s) z + momentum = 0; it is largest at an extreme s.
    radii = []
    for s in (mu, nu):
        middle = (1 + momentum - lr * s) / 2
        inside = middle**2 - momentum
        radii.append(abs(middle) + inside**0.5 if inside >= 0 else momentum**0.5)
    return max(radii)
