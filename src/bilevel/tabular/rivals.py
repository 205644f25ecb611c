"""What ours is compared with: scikit-learn's own cross-validated models, and the best constant."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bilevel.tabular.target import Model
from bilevel.tabular.values import Floats

# Grids wide enough that no table of standardised features has its best penalty at an end.
RIDGE_GRID = np.logspace(-4, 6, 31)
LOGISTIC_GRID = np.logspace(-5, 5, 31)
NAMES: dict[Model, str] = {
    "ridge": "RidgeCV",
    "elastic-net": "ElasticNetCV",
    "logistic": "LogisticRegressionCV",
}


@dataclass(frozen=True)
class Rival:
    """scikit-learn's model for the same task, tuned on the same folds by its own grid search.

    Args:
        model: the task.
        folds: a splitter of scikit-learn, the same that ours is tuned on.
        l1_ratio: of the elastic net.
    """

    model: Model
    folds: Any
    l1_ratio: float = 0.5

    @property
    def name(self) -> str:
        return NAMES[self.model]

    @property
    def grid(self) -> str:
        """What it searched, in words."""
        return {
            "ridge": f"{len(RIDGE_GRID)} penalties from 1e-4 to 1e6",
            "elastic-net": "its path of 100 penalties",
            "logistic": f"{len(LOGISTIC_GRID)} penalties from 1e-5 to 1e5",
        }[self.model]

    def fit(self, X: Floats, y: NDArray[Any], weights: Floats | None) -> Any:
        from sklearn import linear_model

        if self.model == "ridge":
            estimator = linear_model.RidgeCV(alphas=RIDGE_GRID, cv=self.folds, scoring="neg_mean_squared_error")
        elif self.model == "elastic-net":
            estimator = linear_model.ElasticNetCV(l1_ratio=self.l1_ratio, cv=self.folds, max_iter=10_000)
        else:
            estimator = linear_model.LogisticRegressionCV(
                Cs=1 / LOGISTIC_GRID[::-1], cv=self.folds, scoring="neg_log_loss", max_iter=1000
            )
        with warnings.catch_warnings():
            # Names of arguments that change between releases, and grid points where a solver stops early: the best
            # point of the grid is what counts.
            warnings.simplefilter("ignore")
            return estimator.fit(X, y, sample_weight=weights)

    def penalty(self, fitted: Any) -> float:
        """What it chose, in the units of ours; of a penalty for each class, the geometric mean."""
        if self.model == "logistic":
            return float(np.exp(-np.log(np.atleast_1d(fitted.C_)).mean()))
        return float(fitted.alpha_)


@dataclass(frozen=True)
class Constant:
    """The best prediction that looks at no feature: the mean, or the classes' frequencies.

    >>> Constant.of(np.array([1.0, 2.0, 6.0]), None, 0).value
    3.0
    """

    value: Any

    @staticmethod
    def of(y: NDArray[Any], weights: Floats | None, classes: int) -> Constant:
        if not classes:
            return Constant(float(np.average(y, weights=weights)))
        counts = np.bincount(y, weights=weights, minlength=classes)
        return Constant(counts / counts.sum())

    def predict(self, rows: int) -> Floats:
        if isinstance(self.value, float):
            return np.full(rows, self.value)
        return np.tile(self.value, (rows, 1))
