"""The tuned estimators, fitted to a table's numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bilevel.tabular.penalised import minimise
from bilevel.tabular.settings import TuneSettings
from bilevel.tabular.target import Model
from bilevel.tabular.values import Floats

ESTIMATORS: dict[Model, str] = {
    "ridge": "BilevelRidge",
    "elastic-net": "BilevelElasticNet",
    "logistic": "BilevelLogisticRegression",
}


@dataclass(frozen=True)
class Fitted:
    """What an estimator found, and its account of how.

    Args:
        coefficients: outputs × features.
        intercept: one for each output.
        penalty: of every feature, in scikit-learn's units; see `bilevel.tabular.penalised`.
        history: the validation error, the norm of its hypergradient and the seconds, by hyperiteration.
        method: which way to the hypergradient was taken, and why.
        outcome: how the tuning ended.
        certificate: what the theory lets us say about the result, in words.
        iterations: hyperiterations.
    """

    coefficients: Floats
    intercept: Floats
    penalty: Floats
    history: dict[str, list[float]]
    method: str
    outcome: str
    certificate: str
    iterations: int


def estimator_class(model: Model) -> Any:
    """The class of `bilevel.estimators` for a model; importing it takes seconds, which do not count as tuning."""
    from bilevel import estimators

    return getattr(estimators, ESTIMATORS[model])


def fit(
    model: Model,
    X: Floats,
    y: NDArray[Any],
    weights: Floats | None,
    folds: Any,
    settings: TuneSettings,
    groups: NDArray[np.int64] | None,
    verbose: bool,
) -> Fitted:
    """Tune and fit an estimator."""
    extra = {"l1_ratio": settings.l1_ratio} if model == "elastic-net" else {}
    estimator: Any = estimator_class(model)(
        settings.penalty if groups is None else groups,
        cv=folds,
        max_iter=settings.max_iter,
        random_state=settings.seed,
        verbose=verbose,
        **extra,
    )
    estimator.fit(X, y, sample_weight=weights)
    return Fitted(
        np.atleast_2d(np.asarray(estimator.coef_, dtype=float)),
        np.atleast_1d(np.asarray(estimator.intercept_, dtype=float)),
        np.broadcast_to(np.asarray(estimator.alpha_, dtype=float), X.shape[1]).copy(),
        {name: [float(value) for value in values] for name, values in estimator.history_.items()},
        str(estimator.method_),
        str(estimator.outcome_),
        str(estimator.certificate_),
        int(estimator.n_iter_),
    )


def refit(
    model: Model, fitted: Fitted, X: Floats, y: NDArray[Any], weights: Floats | None, settings: TuneSettings
) -> Fitted:
    """The same penalties, fitted to other rows."""
    coefficients, intercept = minimise(model, X, y, fitted.penalty, weights, settings.l1_ratio)
    return replace(fitted, coefficients=coefficients, intercept=intercept)
