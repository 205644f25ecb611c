"""The models that are compared: ours and scikit-learn's."""

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

from bilevel.estimators import (
    BilevelAdditiveClassifier,
    BilevelAdditiveRegressor,
    BilevelElasticNet,
    BilevelLogisticRegression,
    BilevelRidge,
)
from bilevel.tabular.settings import ModelKind
from bilevel.tabular.splits import Pair
from bilevel.tabular.values import Floats

LINEAR: dict[ModelKind, Any] = {
    "ridge": BilevelRidge,
    "elastic-net": BilevelElasticNet,
    "logistic": BilevelLogisticRegression,
}
# In double precision, smaller penalties of a standardised feature give the same fit as this one.
MIN_PENALTY = 1e-12
# Wide grids, so that the best penalty of standardised features is not at an end.
RIDGE_GRID = np.logspace(-4, 6, 31)
LOGISTIC_GRID = np.logspace(-5, 5, 21)
CONSTANT = {False: "mean", True: "class frequencies"}


def kinds_for(classes: bool, asked: ModelKind | None, groups: bool = False) -> list[ModelKind]:
    """The kinds of our models to try. Only linear models can have groups of features that share a penalty.

    >>> kinds_for(False, None), kinds_for(True, None), kinds_for(True, None, groups=True)
    (['additive', 'ridge', 'elastic-net'], ['additive', 'logistic'], ['logistic'])
    """
    if asked is not None:
        return [asked]
    return [*([] if groups else ["additive"]), *(["logistic"] if classes else ["ridge", "elastic-net"])]  # type: ignore[list-item]


def additive_estimator(classes: bool, *, cv: list[Pair] | None, max_iter: int, seed: int) -> Any:
    """Our additive model, not fitted. Its input is the columns, not features computed from them.

    Args:
        cv: pairs of training and test rows. None leaves out single rows, which is faster.
    """
    kind = BilevelAdditiveClassifier if classes else BilevelAdditiveRegressor
    default = kind()
    return default.set_params(cv=cv, max_iter=min(max_iter, default.max_iter), random_state=seed, verbose=False)


def make_estimator(model: ModelKind, penalty: Any, *, cv: Any, max_iter: int, seed: int, l1_ratio: float | None) -> Any:
    """A linear estimator of `bilevel.estimators`, not fitted.

    Args:
        penalty: "shared", "per-feature" or the group of every feature.
        cv: a number of folds, or pairs of training and test rows.
    """
    mixing = {"l1_ratio": 0.5 if l1_ratio is None else l1_ratio} if model == "elastic-net" else {}
    return LINEAR[model](penalty, cv=cv, max_iter=max_iter, random_state=seed, verbose=False, **mixing)


def rivals(classes: bool, folds: list[Pair], seed: int, exchangeable: bool) -> dict[str, Any]:
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
    model: ModelKind,
    X: Floats,
    y: NDArray[Any],
    weights: Floats | None,
    folds: list[Pair],
    l1_ratio: float | None,
    exchangeable: bool,
) -> tuple[str, float]:
    """The name of scikit-learn's model with one penalty for all features, and that penalty in the units of ours."""
    name = {"elastic-net": "ElasticNetCV", "logistic": "LogisticRegressionCV", "ridge": "RidgeCV"}[model]
    estimator = rivals(model == "logistic", folds, 0, exchangeable)[name]
    if model == "elastic-net":
        estimator.set_params(l1_ratio=0.5 if l1_ratio is None else l1_ratio)
    fit_quietly(estimator, X, y, weights)
    if model == "logistic":  # the geometric mean over classes, which may have different penalties
        return name, float(np.exp(-np.log(np.atleast_1d(estimator.C_)).mean()))
    return name, float(estimator.alpha_)
