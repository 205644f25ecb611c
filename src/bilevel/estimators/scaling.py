"""Centring and scaling of the features."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse

from bilevel.errors import BilevelError
from bilevel.estimators.folds import Array
from bilevel.estimators.hyperparameters import Grouping

# Variances below this one lose digits, because squares of smaller numbers underflow.
TINY = 1e-250


@np.errstate(over="ignore", invalid="ignore")  # `_refuse_extremes` says what is wrong
def centred(X: Any, weight: Array, intercept: bool, names: list[str] | None = None) -> tuple[Any, Array, Array]:
    """X with the means subtracted if there is an intercept, the means, and the variances of the features.

    The intercept absorbs the shift. Without centring, sums of squares of numbers far from zero (years, seconds since
    1970) would lose all digits to rounding. A sparse X is not changed and its means are returned as zero, but its
    variances are taken about the true means. Without an intercept, means are zero and variances are mean squares.
    Errors call columns by their names, or by their positions.
    """
    share = weight / weight.sum()
    mean = np.asarray(share @ X).reshape(-1) if intercept else np.zeros(X.shape[1])
    if sparse.issparse(X):
        column, entry_share = X.indices, np.repeat(share, np.diff(X.indptr))
        squares = np.bincount(column, entry_share * (X.data - mean[column]) ** 2, minlength=X.shape[1])
        nonzero_share = np.bincount(column, entry_share, minlength=X.shape[1])
        variance, centre = squares + np.clip(1 - nonzero_share, 0, None) * mean**2, np.zeros_like(mean)
    else:
        X, centre = (X - mean if intercept else X), mean
        # In blocks of rows, because the squares of all rows would take as much memory as X.
        variance = sum(share[at : at + 2_000] @ X[at : at + 2_000] ** 2 for at in range(0, len(X), 2_000))
    _refuse_extremes(X, weight, mean, variance, names)
    # A constant column has a variance of zero up to rounding.
    varies = variance > (1e-12 * mean) ** 2
    if intercept and not sparse.issparse(X):
        X[:, ~varies] = 0.0
    return X, centre, np.where(varies, variance, 0.0)


def _refuse_extremes(X: Any, weight: Array, mean: Array, variance: Array, names: list[str] | None) -> None:
    """Refuse features whose squares overflow, or underflow although the feature is not constant.

    Args:
        X: centred rows if they are dense, rows as given if they are sparse.
    """
    extreme, tiny = ~np.isfinite(variance), np.flatnonzero(variance < TINY)
    if len(tiny):
        rows, distance = X[weight > 0][:, tiny], np.zeros(len(tiny))
        if sparse.issparse(rows):
            np.maximum.at(distance, rows.indices, np.abs(rows.data - mean[tiny][rows.indices]))
        else:
            distance = np.abs(rows).max(0)
        extreme[tiny] = distance > 1e-12 * np.abs(mean[tiny])
    for j in np.flatnonzero(extreme).tolist():
        raise BilevelError(
            f"The squares of the numbers in column {names[j] if names else j!r} of X are too "
            f"{'small' if variance[j] < 1 else 'large'} for double precision. Scale the columns first, for example "
            "with StandardScaler."
        )


def curvatures(variance: Array) -> tuple[float, float]:
    """The smallest and the largest variance of a feature. Constant features do not count, nor do almost constant ones.

    >>> curvatures(np.array([0.0, 1e-20, 4.0]))
    (4e-08, 4.0)
    """
    largest = float(variance.max()) or 1.0
    return max(float(variance.min(where=variance > 0, initial=largest)), 1e-8 * largest), largest


def units(variance: Array, groups: Grouping) -> Array:
    """The scale of every feature: the root of the mean variance of its group, or 1 if the group is constant."""
    mean = groups.mean(variance)
    return np.sqrt(np.where(mean > 0, mean, 1.0))[groups.of]


def divided(X: Any, scale: Array, in_place: bool) -> Any:
    """X / scale, written into X if X is dense and `in_place` is true.

    Otherwise it is a copy: the user may change X after the fit, and some results are computed when they are first read.
    """
    if sparse.issparse(X):
        return (X @ sparse.diags(1 / scale)).tocsr()
    return np.divide(X, scale, out=X if in_place else None)
