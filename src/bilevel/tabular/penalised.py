"""Linear models at given penalties, one for each feature, by scikit-learn's solvers on features rescaled to fit them.

With v_j = w_j √α_j the penalty Σ α_j w_j² is ‖v‖², and what is left is a model with one penalty. Used to fit the saved
model to all rows with the penalties that were tuned on some of them.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bilevel.tabular.target import Model
from bilevel.tabular.values import Floats

# A penalty below it, for standardised features, is none: the fit does not change in double precision.
LEAST = 1e-12


def minimise(
    model: Model, X: Floats, y: NDArray[Any], penalty: Floats, weights: Floats | None, l1_ratio: float = 0.5
) -> tuple[Floats, Floats]:
    """Coefficients, outputs × features, and intercepts, one for each output, in scikit-learn's units of the penalty.

    - ridge: Σ_i s_i (y_i − x_i·w − b)² + Σ_j α_j w_j²
    - elastic-net: Σ_i s_i (y_i − x_i·w − b)² / (2 Σ s) + Σ_j α_j (ρ |w_j| + (1 − ρ)/2 w_j²)
    - logistic: −Σ_i s_i log p(y_i | x_i) + ½ Σ_j α_j ‖w_j‖²

    >>> X, y = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]), np.array([2.0, -2.0, 2.0, -2.0])
    >>> minimise("ridge", X, y, np.array([2.0, 6.0]), None)[0].round(6)
    array([[1. , 0.5]])
    """
    if model == "elastic-net":
        return _elastic_net(X, y, penalty, weights, l1_ratio)
    from sklearn import linear_model

    root = np.sqrt(np.maximum(penalty, LEAST))
    if model == "ridge":
        estimator = linear_model.Ridge(alpha=1.0)
    else:
        estimator = linear_model.LogisticRegression(C=1.0, tol=1e-10, max_iter=20_000)
    estimator.fit(X / root, y, sample_weight=weights)
    return np.atleast_2d(estimator.coef_) / root, np.atleast_1d(np.asarray(estimator.intercept_, dtype=float))


def _elastic_net(
    X: Floats, y: Floats, penalty: Floats, weights: Floats | None, l1_ratio: float
) -> tuple[Floats, Floats]:
    """The squares of the penalty are rows of their own, and what is left is a lasso of rescaled features."""
    from sklearn import linear_model

    share = np.full(len(y), 1 / len(y)) if weights is None else weights / weights.sum()
    x_mean, y_mean = share @ X, float(share @ y)
    root = np.sqrt(share)[:, None]
    rows = [root * (X - x_mean), np.diag(np.sqrt((1 - l1_ratio) * penalty))]
    goal = np.concatenate([root[:, 0] * (y - y_mean), np.zeros(len(penalty))])
    rescale = l1_ratio * np.maximum(penalty, LEAST)
    lasso = linear_model.Lasso(alpha=1 / len(goal), fit_intercept=False, tol=1e-12, max_iter=100_000)
    with warnings.catch_warnings():
        # Its duality gap is measured in the units of the rescaled features and may stop above 1e-12 of them.
        warnings.simplefilter("ignore")
        lasso.fit(np.concatenate(rows) / rescale, goal)
    w = lasso.coef_ / rescale
    return w[None], np.array([y_mean - x_mean @ w])
