"""The optimism of the criterion at the penalties that minimise it, estimated by leaving each row out of the tuning.

f(λ) = Σ_i s_i loss(η_i(λ), y_i) / Σ s has one term for every held-out row, where η_i is its score by a model that was
fitted without it. If row i is also removed from f, the minimiser λ changes, and with it η_i. To first order, the change
is one Newton step. The Hessian of f is approximated by its Gauss–Newton part and the tether:

    H = Σ_i s_i J_iᵀ V_i J_i + Σ s · ∇²tether,   J_i = ∂η_i/∂λ,   V_i = ∇²loss,   A_i = J_i H⁻¹ J_iᵀ,
    η_i + A_i (I − V_i A_i)⁻¹ ∇loss,

the formula of the leave-one-out error of a regression, applied to λ in place of w. Σ_i s_i tr(V_i A_i) is the effective
number of penalties.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bilevel.structures.losses import RowLoss


@dataclass(frozen=True, eq=False)
class HeldOutRows:
    """The held-out rows, each with its score by a model that was fitted without it.

    Attributes:
        scores: of shape items × outputs. A row that is in the validation sets of several folds is several items.
        slopes: their derivatives with respect to λ, items × outputs × size of λ.
        y: the targets, items × outputs.
        weight: the weight of every item.
    """

    scores: Tensor
    slopes: Tensor
    y: Tensor
    weight: Tensor

    def with_shared_penalty(self) -> HeldOutRows:
        """The same rows for a λ with one entry, the penalty of all features."""
        return HeldOutRows(self.scores, self.slopes.sum(-1, keepdim=True), self.y, self.weight)


def corrected_losses(rows: HeldOutRows, loss: RowLoss, tether: Tensor, mean: bool) -> tuple[Tensor, float]:
    """The loss of every item if it is left out of the tuning as well, and the effective number of penalties.

    Args:
        tether: the diagonal of Σ s · ∇²tether at a fixed mean of λ.
        mean: whether the tether is relative to the mean of λ.
    """
    scores, y = rows.scores.mT[None], rows.y.mT
    curvature, slope = loss.hessians(scores, y), loss.slopes(scores, y)[0].mT
    leverage = _leverages(rows.slopes, curvature * rows.weight[:, None, None], tether, mean)
    count = float((rows.weight * (curvature * leverage.mT).sum((1, 2))).sum())
    matrix = torch.eye(leverage.shape[1], dtype=leverage.dtype) - curvature @ leverage
    change = (leverage @ torch.linalg.solve(matrix, slope[:, :, None]))[:, :, 0]
    return loss.values(scores + change.mT[None], y)[0], count


def _leverages(slopes: Tensor, curvature: Tensor, tether: Tensor, mean: bool) -> Tensor:
    """J_i H⁻¹ J_iᵀ for every item, by a system of the smaller size: entries of λ, or items × outputs."""
    items, outputs, size = slopes.shape
    flat, curved = slopes.reshape(-1, size), (curvature @ slopes).reshape(-1, size)
    if size <= items * outputs:
        tether_hessian = torch.diag(tether)
        if mean:
            centred = torch.eye(size, dtype=tether_hessian.dtype) - 1 / size
            tether_hessian = centred @ tether_hessian @ centred
        hessian = flat.mT @ curved + tether_hessian
        hessian.diagonal().add_(1e-10 * hessian.diagonal().mean() + 1e-300)
        solved = torch.cholesky_solve(flat.mT, torch.linalg.cholesky(hessian)).mT
        return solved.reshape(slopes.shape) @ slopes.mT
    # P is the inverse of the tether's Hessian at a fixed mean of λ, and K = J P Jᵀ + τ (J 1)(J 1)ᵀ with a large τ.
    # Then J H⁻¹ Jᵀ = K (I + V K)⁻¹.
    inverse = 1 / tether.clamp(min=1e-12 * float(tether.max()))
    kernel = (flat * inverse) @ flat.mT
    if mean:
        across = flat @ inverse
        kernel -= torch.outer(across, across) / inverse.sum()
        along = flat.sum(1)
        kernel += torch.outer(along, along) * (1e6 / max(float(along @ curved.sum(1)), 1e-300))
    system = torch.eye(len(kernel), dtype=kernel.dtype)
    blocks = kernel.reshape(items, outputs, -1)
    system += (curvature @ blocks).reshape(kernel.shape)
    leverages = torch.linalg.solve(system, kernel, left=False).reshape(items, outputs, items, outputs)
    return leverages[torch.arange(items), :, torch.arange(items)]
