"""How much the criterion flatters penalties that were tuned on it: each row is left out of the tuning, too.

f(λ) = Σ_i s_i loss(η_i(λ), y_i) / Σ s has one term for every row that is held out, where η_i is its score by a model
that did not see it. Leaving row i out of f as well moves λ, and with it η_i. To first order, that is one Newton step
with the Hessian of f, of which the part of Gauss and Newton and the tether are taken:

    H = Σ_i s_i J_iᵀ V_i J_i + Σ s · ∇²tether,   J_i = ∂η_i/∂λ,   V_i = ∇²loss,   A_i = J_i H⁻¹ J_iᵀ,
    η_i + A_i (I − V_i A_i)⁻¹ ∇loss,

the same formula as the leave-one-out of a regression, one level up. Σ_i s_i tr(V_i A_i) is the effective number of
penalties.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bilevel.structures.losses import RowLoss


@dataclass(frozen=True, eq=False)
class HeldOutRows:
    """The rows that are held out, each with its score by a model that did not see it.

    Attributes:
        scores: items × outputs.
        slopes: their derivatives in λ, items × outputs × size of λ.
        y: items × outputs.
        weight: of every item. A row that several folds are judged on is several items.
    """

    scores: Tensor
    slopes: Tensor
    y: Tensor
    weight: Tensor

    def tied(self) -> HeldOutRows:
        """With one entry of λ for all."""
        return HeldOutRows(self.scores, self.slopes.sum(-1, keepdim=True), self.y, self.weight)


def corrected_losses(held: HeldOutRows, loss: RowLoss, tether: Tensor, mean: bool) -> tuple[Tensor, float]:
    """The loss of every item after it was left out of the tuning as well, and the effective number of penalties.

    Args:
        tether: the diagonal of Σ s · ∇²tether, where the mean of λ is fixed.
        mean: the tether does not depend on the mean of λ.
    """
    scores, y = held.scores.mT[None], held.y.mT
    curvature, slope = _curvatures(loss, scores, y), loss.slopes(scores, y)[0].mT
    leverage = _leverages(held.slopes, curvature * held.weight[:, None, None], tether, mean)
    count = float((held.weight * (curvature * leverage.mT).sum((1, 2))).sum())
    kept = torch.eye(leverage.shape[1], dtype=leverage.dtype) - curvature @ leverage
    change = (leverage @ torch.linalg.solve(kept, slope[:, :, None]))[:, :, 0]
    return loss.values(scores + change.mT[None], y)[0], count


def _curvatures(loss: RowLoss, scores: Tensor, y: Tensor) -> Tensor:
    """V_i, items × outputs × outputs."""
    outputs = scores.shape[1]
    units = torch.eye(outputs, dtype=scores.dtype)
    columns = [loss.hessian_times(scores, y, unit[:, None].expand_as(scores))[0] for unit in units]
    return torch.stack(columns).permute(2, 0, 1)


def _leverages(slopes: Tensor, curvature: Tensor, tether: Tensor, mean: bool) -> Tensor:
    """J_i H⁻¹ J_iᵀ for every item, in the smaller of the two dimensions: items or entries of λ."""
    items, outputs, size = slopes.shape
    flat, bent = slopes.reshape(-1, size), (curvature @ slopes).reshape(-1, size)
    if size <= items * outputs:
        fixed = torch.diag(tether)
        if mean:
            centred = torch.eye(size, dtype=fixed.dtype) - 1 / size
            fixed = centred @ fixed @ centred
        hessian = flat.mT @ bent + fixed
        hessian.diagonal().add_(1e-10 * hessian.diagonal().mean() + 1e-300)
        solved = torch.cholesky_solve(flat.mT, torch.linalg.cholesky(hessian)).mT
        return solved.reshape(slopes.shape) @ slopes.mT
    # P is the inverse of the tether's Hessian where the mean is fixed, and K = J P Jᵀ + τ (J 1)(J 1)ᵀ with a large τ.
    # Then J H⁻¹ Jᵀ = K (I + V K)⁻¹.
    inverse = 1 / tether.clamp(min=1e-12 * float(tether.max()))
    kernel = (flat * inverse) @ flat.mT
    if mean:
        across = flat @ inverse
        kernel -= torch.outer(across, across) / inverse.sum()
        along = flat.sum(1)
        kernel += torch.outer(along, along) * (1e6 / max(float(along @ bent.sum(1)), 1e-300))
    system = torch.eye(len(kernel), dtype=kernel.dtype)
    blocks = kernel.reshape(items, outputs, -1)
    system += (curvature @ blocks).reshape(kernel.shape)
    found = torch.linalg.solve(system, kernel, left=False).reshape(items, outputs, items, outputs)
    return found[torch.arange(items), :, torch.arange(items)]
