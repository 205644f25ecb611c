"""Features about their means and in units of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse

from bilevel.estimators.folds import Array
from bilevel.estimators.hyperparameters import Grouping


def centred(X: Any, weight: Array, intercept: bool) -> tuple[Any, Array, Array]:
    """X about its means where there is an intercept, the means, and the features' variances about them.

    An intercept makes up for any shift, and sums of squares of numbers far from zero would be lost in rounding: years,
    or seconds since 1970. A sparse X stays as it is, with means of zero, but its variances are about the true means.
    Without an intercept, means are zero and variances are mean squares.
    """
    share = weight / weight.sum()
    mean = np.asarray(share @ X).reshape(-1) if intercept else np.zeros(X.shape[1])
    if sparse.issparse(X):
        column, owner = X.indices, np.repeat(share, np.diff(X.indptr))
        away = np.bincount(column, owner * (X.data - mean[column]) ** 2, minlength=X.shape[1])
        there = np.bincount(column, owner, minlength=X.shape[1])
        variance, centre = away + np.clip(1 - there, 0, None) * mean**2, np.zeros_like(mean)
    else:
        X, centre = (X - mean if intercept else X), mean
        # Squares of a large X at once would be another copy of it.
        variance = sum(share[at : at + 2_000] @ X[at : at + 2_000] ** 2 for at in range(0, len(X), 2_000))
    # What is left of a constant's deviation is rounding.
    return X, centre, np.where(variance > (1e-12 * mean) ** 2, variance, 0.0)


def units(variance: Array, groups: Grouping) -> Array:
    """The deviation of every feature, the root of the mean variance in a group; 1 where all are constant."""
    mean = groups.mean(variance)
    return np.sqrt(np.where(mean > 0, mean, 1.0))[groups.of]


def divided(X: Any, scale: Array, own: bool) -> Any:
    """X / scale, in place where a dense X is our own copy."""
    if sparse.issparse(X):
        return X if (scale == 1).all() else (X @ sparse.diags(1 / scale)).tocsr()
    # Tensors share memory with arrays that can be written to and run forwards.
    if (scale == 1).all() and X.flags.writeable and min(X.strides) >= 0:
        return X
    return np.divide(X, scale, out=X if own else None)
