"""Our estimators for tables."""

from __future__ import annotations

from typing import Any

from bilevel.estimators import (
    BilevelAdditiveClassifier,
    BilevelAdditiveRegressor,
    BilevelElasticNet,
    BilevelLogisticRegression,
    BilevelRidge,
)
from bilevel.tabular.settings import ModelKind

LINEAR: dict[ModelKind, Any] = {
    "ridge": BilevelRidge,
    "elastic-net": BilevelElasticNet,
    "logistic": BilevelLogisticRegression,
}
# In double precision, smaller penalties of a standardised feature give the same fit as this one.
MIN_PENALTY = 1e-12


def kinds_for(classes: bool, asked: ModelKind | None, groups: bool = False) -> list[ModelKind]:
    """The kinds of our models to try. Only linear models can have groups of features that share a penalty.

    >>> kinds_for(False, None), kinds_for(True, None), kinds_for(True, None, groups=True)
    (['additive', 'ridge', 'elastic-net'], ['additive', 'logistic'], ['logistic'])
    """
    if asked is not None:
        return [asked]
    return [*([] if groups else ["additive"]), *(["logistic"] if classes else ["ridge", "elastic-net"])]  # type: ignore[list-item]


def additive_estimator(classes: bool, *, max_iter: int, seed: int) -> Any:
    """Our additive model, not fitted. Its input is the columns, not features computed from them."""
    kind = BilevelAdditiveClassifier if classes else BilevelAdditiveRegressor
    default = kind()
    return default.set_params(max_iter=min(max_iter, default.max_iter), random_state=seed, verbose=False)


def make_estimator(
    model: ModelKind, penalty: Any, *, cv: Any, max_iter: int, seed: int, l1_ratio: float | None, verbose: bool = False
) -> Any:
    """A linear estimator of `bilevel.estimators`, not fitted.

    Args:
        penalty: "shared", "per-feature" or the group of every feature.
        cv: a number of folds, or pairs of training and test rows.
    """
    mixing = {"l1_ratio": 0.5 if l1_ratio is None else l1_ratio} if model == "elastic-net" else {}
    return LINEAR[model](penalty, cv=cv, max_iter=max_iter, random_state=seed, verbose=verbose, **mixing)
