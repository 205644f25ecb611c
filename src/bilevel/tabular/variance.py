"""The share of the target's variance that each group of columns explains, on held-out rows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from bilevel.tabular.comparing import ComparedModel
from bilevel.tabular.preparing import UsedTable
from bilevel.tabular.values import Floats


def explained_shares(contributions: Floats, y: Floats, predicted: Floats, weights: Floats | None = None) -> Floats:
    """The parts of R² = Σ s ŷ(2ỹ − ŷ) / Σ s ỹ², with ŷ = Σ_g c_g: part g is Σ s c_g (2ỹ − ŷ) / Σ s ỹ².

    ỹ and ŷ are y and the prediction minus the intercept, so the parts sum to 1 − Σ s (y − prediction)² / Σ s ỹ². A part
    is negative if its group makes predictions worse.

    >>> c = np.array([[1.0, 0.0], [-1.0, 0.0]])
    >>> explained_shares(c, np.array([3.0, 1.0]), np.array([3.0, 1.0])).tolist()
    [1.0, 0.0]
    """
    weights = np.ones(len(y)) if weights is None else weights
    total = contributions.sum(1)
    centred = y - (predicted - total)
    scale = float(weights @ centred**2)
    return (weights * (2 * centred - total)) @ contributions / scale if scale > 0 else np.zeros(contributions.shape[1])


def score_shares(contributions: Floats) -> Floats:
    """For classes: the share in the variance of the linear score η = Σ_g c_g, Σ cov(c_g, η) / Σ var(η) over outputs.

    >>> score_shares(np.array([[[1.0, 0.0]], [[-1.0, 0.0]]])).tolist()
    [1.0, 0.0]
    """
    centred = contributions - contributions.mean(0)
    total = centred.sum(2)
    scale = float((total**2).sum())
    return np.einsum("ikg,ik->g", centred, total) / scale if scale > 0 else np.zeros(contributions.shape[2])


def variance_by_group(used: UsedTable, model: ComparedModel, groups: Mapping[str, str]) -> dict[str, float]:
    """The share that each group explains, the largest first. Without groups, the share of each column."""
    if model.contributions is None:
        return {}
    columns = list(used.kinds)
    names = list(dict.fromkeys(groups.get(column, column) for column in columns))
    group_index = np.array([names.index(groups.get(column, column)) for column in columns])
    tested = ~np.isnan(model.contributions[:, 0, 0])
    parts = model.contributions[tested] @ np.eye(len(names))[group_index]
    weights = None if used.weights is None else used.weights[tested]
    if used.classes:
        shares = score_shares(parts)
    else:
        shares = explained_shares(parts[:, 0], used.y[tested], model.predicted[tested], weights)
    share_of = dict(zip(names, shares.tolist(), strict=True))
    return dict(sorted(share_of.items(), key=lambda item: -item[1]))
