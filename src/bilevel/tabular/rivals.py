"""The models of scikit-learn that ours are compared with."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.linear_model import ElasticNetCV, LassoCV, LogisticRegressionCV, RidgeCV

from bilevel.tabular.settings import ModelKind
from bilevel.tabular.splits import Pair
from bilevel.tabular.values import Floats

# Wide grids, so that the best penalty of standardised features is not at an end.
RIDGE_GRID = np.logspace(-4, 6, 31)
LOGISTIC_GRID = np.logspace(-5, 5, 21)
CONSTANT = {False: "mean", True: "class frequencies"}


def rivals(classes: bool, folds: list[Pair], seed: int, exchangeable: bool = True) -> dict[str, Any]:
    """The estimators by name, not fitted. Those with a penalty tune it on the folds.

    Args:
        exchangeable: whether single rows may be left out. RidgeCV then uses its faster leave-one-out criterion.
    """
    if classes:
        grid = {"Cs": 1 / LOGISTIC_GRID[::-1], "scoring": "neg_log_loss", "max_iter": 1000}
        return {
            CONSTANT[True]: DummyClassifier(strategy="prior"),
            "LogisticRegressionCV": LogisticRegressionCV(cv=folds, **grid),
            "RandomForestClassifier": RandomForestClassifier(random_state=seed),
            "HistGradientBoostingClassifier": HistGradientBoostingClassifier(random_state=seed),
        }
    return {
        CONSTANT[False]: DummyRegressor(),
        "RidgeCV": RidgeCV(alphas=RIDGE_GRID, cv=None if exchangeable else folds),
        "LassoCV": LassoCV(cv=folds, max_iter=5000),
        "ElasticNetCV": ElasticNetCV(cv=folds, max_iter=5000),
        "RandomForestRegressor": RandomForestRegressor(random_state=seed),
        "HistGradientBoostingRegressor": HistGradientBoostingRegressor(random_state=seed),
    }


def fit_quietly(estimator: Any, X: Any, y: NDArray[Any], weights: Floats | None) -> Any:
    """Fit without scikit-learn's warnings about arguments that were renamed or about convergence on a grid."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return estimator.fit(X, y) if weights is None else estimator.fit(X, y, sample_weight=weights)


def one_penalty(
    model: ModelKind, X: Floats, y: NDArray[Any], weights: Floats | None, folds: list[Pair], l1_ratio: float | None
) -> tuple[str, float]:
    """The name of scikit-learn's model with one penalty for all features, and that penalty in the units of ours."""
    if model == "elastic-net":
        estimator: Any = ElasticNetCV(l1_ratio=0.5 if l1_ratio is None else l1_ratio, cv=folds, max_iter=5000)
    else:
        estimator = rivals(model == "logistic", folds, 0)["LogisticRegressionCV" if model == "logistic" else "RidgeCV"]
    fit_quietly(estimator, X, y, weights)
    if model == "logistic":  # the geometric mean over classes, which may have different penalties
        return "LogisticRegressionCV", float(np.exp(-np.log(np.atleast_1d(estimator.C_)).mean()))
    return type(estimator).__name__, float(estimator.alpha_)
