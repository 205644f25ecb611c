"""A bound on the distance of any vector from ∇f(λ), for a strongly convex inner problem."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bilevel import trees
from bilevel.dynamics import gradient
from bilevel.engine.any_order import any_order
from bilevel.engine.limits import objective_at_rest
from bilevel.engine.process import Process
from bilevel.linear_solvers.base import Operator
from bilevel.linear_solvers.lanczos import lanczos
from bilevel.trees import Tree

# Matrix-vector products for each estimate of a matrix norm.
PRODUCTS = 20


def error_bound(process: Process, u: Tree, radius: float, mu: float, found: Tree, v: Tensor) -> float:
    """A bound on ‖found − ∇f(λ)‖, where ‖u − w_λ‖ ≤ radius and L is μ-strongly convex.

    For any v let ψ = E + ⟨v, ∇_w L⟩. Where v solves ∇_w ψ = ∇_w E + ∇²_w L v = 0 at w_λ, ∇_λ ψ is ∇f. Otherwise they
    differ by at most (‖∇²_{λw} L‖/μ) ‖∇_w ψ‖. At u instead of w_λ, both gradients of ψ differ by the radius times their
    derivatives in w. So

        ‖found − ∇f‖ ≤ ‖found − ∇_λ ψ‖ + (M/μ) (‖∇_w ψ‖ + K_w radius) + K_λ radius,

    with everything evaluated at u. Lanczos' method estimates M = ‖∇²_{λw} L‖, K_w = ‖∇²_w ψ‖ and K_λ = ‖∇²_{wλ} ψ‖;
    the rest is computed.

    Returns:
        The bound; infinite where autograd has no third derivatives of L.
    """
    leaves, spec = trees.flatten(process.lam)
    lam = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    with any_order():
        live = Process(
            process.problem, spec.unflatten(lam), process.task, process.source, 0, u, allow_unused=True, live=True,
            memory=process.memory,
        )  # fmt: skip
    points, shape = trees.flatten(u)
    points = [point.detach().clone().requires_grad_() for point in points]
    w = shape.unflatten(points)
    with torch.enable_grad(), any_order():
        slope = trees.leaves(gradient(objective_at_rest(live.bound, 1), w))
        parts = trees.from_vector(v.detach(), points)
        pairing = sum(((a * b).sum() for a, b in zip(slope, parts, strict=True)), torch.zeros((), device=v.device))
        psi = live.bound.outer((w, ())) + pairing
        by_lam, by_w = _gradients([psi], lam), _gradients([psi], points)
        distance = _norm([a - b for a, b in zip(trees.leaves(found), by_lam, strict=True)])
        cross = _jacobian_norm(slope, lam)
        try:
            change_lam, change_w = (_jacobian_norm(parts, points) for parts in (by_lam, by_w))
        except RuntimeError as error:
            if "derivative" not in str(error) and "differentiate" not in str(error):
                raise
            return math.inf
    rounding = 16 * torch.finfo(v.dtype).eps * (_norm(by_lam) + cross * float(v.norm()))
    return distance + cross / mu * (_norm(by_w) + change_w * radius) + change_lam * radius + rounding


def _jacobian_norm(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> float:
    """‖J‖ for J = ∂outputs/∂inputs, the upper estimate of Lanczos' method on JᵀJ."""
    recorded = [out for out in outputs if out.requires_grad]
    if not recorded:
        return 0.0
    dual = [torch.zeros_like(out).requires_grad_() for out in recorded]
    # Jᵀ y is linear in y, and its derivative in y gives products with J.
    back = _gradients(recorded, inputs, dual)
    if not any(part.requires_grad for part in back):
        return 0.0

    def product(vector: Tensor) -> Tensor:
        pieces = trees.from_vector(vector, inputs)
        forward = _gradients(back, dual, pieces, create_graph=False)
        return trees.to_vector(_gradients(recorded, inputs, forward, create_graph=False))

    like = trees.to_vector([x.detach() for x in inputs])
    return math.sqrt(max(lanczos(Operator(product, symmetric=True), like, PRODUCTS).largest, 0.0))


def _gradients(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    cotangents: Sequence[Tensor] | None = None,
    create_graph: bool = True,
) -> list[Tensor]:
    """Gradients, or zeros where there are none."""
    pairs = [(out, None if cotangents is None else cotangents[i]) for i, out in enumerate(outputs) if out.requires_grad]
    if not pairs:
        return [torch.zeros_like(x) for x in inputs]
    heads, cots = zip(*pairs, strict=True)
    parts = torch.autograd.grad(
        heads, inputs, None if cotangents is None else cots, create_graph=create_graph, retain_graph=True,
        allow_unused=True,
    )  # fmt: skip
    return [torch.zeros_like(x) if part is None else part for part, x in zip(parts, inputs, strict=True)]


def _norm(parts: Sequence[Tensor]) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(part.detach())) for part in parts))
