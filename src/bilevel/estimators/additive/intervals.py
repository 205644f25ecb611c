"""What prediction intervals are computed from: errors of rows that neither fitted the model nor tuned its penalties."""

from __future__ import annotations

import numpy as np

from bilevel.estimators.additive.criteria import PenaltyGroups, TunedPenalties
from bilevel.estimators.folds import Array

# The estimate of an error without its row in the tuning is at most this number of times the error.
MOST = 10.0


def tuning_factors(
    solved: Array,
    complement: Array,
    errors: Array,
    weight: Array,
    alpha: Array,
    groups: PenaltyGroups,
    tuned: TunedPenalties,
) -> Array:
    """By what factor the leave-one-out error of every row grows if the row is left out of the tuning too.

    The penalties change by about one Newton step, as in `bilevel.estimators.optimism`. With the derivatives J_i of a
    row's left-out score in the log penalties, the Hessian H = Σ s_i J_iᵀ J_i + ∇²tether and A_i = s_i J_i H⁻¹ J_iᵀ, the
    factor is 1 / (1 − A_i).

    Args:
        solved: X A⁻¹, of shape rows × features.
        complement: 1 minus the leverage of every row.
        errors: the leave-one-out errors.
        alpha: the penalty of every feature.
    """
    assert tuned.tether is not None
    without = tuned.w[0].numpy() - (weight * errors)[:, None] * solved
    of, kinds = groups.of, groups.kinds
    slopes = -(solved / complement[:, None]) * without * alpha @ np.eye(len(kinds))[of]
    if np.isinf(tuned.tether):
        slopes = slopes @ np.eye(kinds.max() + 1)[kinds]
        hessian = np.zeros((slopes.shape[1],) * 2)
    else:
        same = kinds[:, None] == kinds
        centred = np.eye(len(kinds)) - same / same.sum(1)
        curvature = 2 * tuned.tether / np.cosh(centred @ tuned.lam.numpy()) ** 2
        hessian = centred @ (curvature[:, None] * centred)
    hessian = hessian + slopes.T @ (weight[:, None] * slopes)
    hessian[np.diag_indices_from(hessian)] += 1e-8 * hessian.diagonal().mean() + 1e-300
    own = weight * ((slopes @ np.linalg.pinv(hessian, hermitian=True)) * slopes).sum(1)
    return 1 / np.maximum(1 - own, 1 / MOST)


def coverages(weight: Array) -> Array:
    """The coverage of an interval whose half width is the k-th smallest error, from the weights in this order.

    With equal weights it is k / (n + 1): a new error is larger than all n with the probability 1 / (n + 1). With
    others, n is the number of equal weights that are as informative, (Σ s)² / Σ s².
    """
    total = float(weight.sum())
    rows = total**2 / float(weight @ weight)
    reached: Array = np.cumsum(weight) / total * rows / (rows + 1)
    return reached
