"""Our estimators of a table."""

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

ESTIMATORS: dict[ModelKind, Any] = {
    "ridge": BilevelRidge,
    "elastic-net": BilevelElasticNet,
    "logistic": BilevelLogisticRegression,
}
# A smaller penalty of a standardised feature does not change the fit in double precision.
LEAST = 1e-12


def kinds_for(classes: bool, asked: ModelKind | None) -> list[ModelKind]:
    """Which of our models to try.

    >>> kinds_for(False, None), kinds_for(True, None)
    (['ridge', 'elastic-net'], ['logistic'])
    """
    if asked is not None:
        return [asked]
    return ["logistic"] if classes else ["ridge", "elastic-net"]


def additive_estimator(classes: bool) -> Any:
    """Our additive model, which reads the columns themselves and not features made of them."""
    return BilevelAdditiveClassifier() if classes else BilevelAdditiveRegressor()


def make_estimator(
    model: ModelKind, penalty: Any, *, cv: Any, max_iter: int, seed: int, l1_ratio: float | None, verbose: bool = False
) -> Any:
    """An estimator of `bilevel.estimators`, not fitted.

    Args:
        penalty: "shared", "per-feature" or the group of every feature.
        cv: a number of folds, or pairs of training and test rows.
    """
    mixing = {"l1_ratio": 0.5 if l1_ratio is None else l1_ratio} if model == "elastic-net" else {}
    return ESTIMATORS[model](penalty, cv=cv, max_iter=max_iter, random_state=seed, verbose=verbose, **mixing)
