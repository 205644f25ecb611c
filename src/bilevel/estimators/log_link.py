"""Regression with a log link, for counts and for positive numbers, with as many penalties as features."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.metrics import d2_tweedie_score

from bilevel.errors import BilevelError
from bilevel.estimators.base import ScoringMixin
from bilevel.estimators.folds import Array, Folds
from bilevel.estimators.hyperparameters import Grouping
from bilevel.estimators.regressor_base import BilevelRegressor
from bilevel.estimators.rows_of_table import RowsOfTable
from bilevel.estimators.tables import FoldedTable
from bilevel.estimators.tensors import as_numpy, like
from bilevel.structures.losses import GammaDeviance, PoissonDeviance, RowLoss


class BilevelLogLink(RegressorMixin, BilevelRegressor):
    """The mean of y is e^(xw + b); the penalties are tuned for the deviance on held-out rows."""

    _several_targets = False
    _loss: ClassVar[RowLoss]
    # The variance of y is proportional to this power of its mean.
    _power: ClassVar[int]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        return tags

    def _fit(self, X: Any, y: Array, sample_weight: Any, groups: Any) -> None:
        self._check_targets(y)
        weight = self._weights(sample_weight, X)
        if not weight @ y > 0:
            raise BilevelError(
                "All targets with a positive weight are zero, so no mean fits them. Pass some targets above 0."
            )
        # With an intercept, y can be divided by its mean. Then w = 0 is a good start and the curvature is about 1.
        mean = float(weight @ y / weight.sum()) if self.fit_intercept else 1.0
        # In the unit of y, the loss and the penalties are larger by this factor.
        self._alpha_unit = mean ** (2 - self._power)
        tuned = self._tune(X, y, weight, (y / mean)[:, None], groups)
        self.coef_, self.intercept_ = tuned.coef[:, 0], float(tuned.intercept[0] + np.log(mean))
        self._set_cv_score(
            [(rows, scores[:, 0] + np.log(mean)) for rows, scores in tuned.held_out], X, y, sample_weight
        )

    def _check_targets(self, y: Array) -> None:
        raise NotImplementedError

    def _table(self, X: Any, y: Array, folds: Folds, groups: Grouping) -> FoldedTable:
        for k in np.flatnonzero(folds.train_weights() @ y[:, 0] <= 0):
            raise BilevelError(
                f"Fold {k} of cv has only targets of 0 to train on, so its mean is 0 and its deviance infinite. "
                "Pass fewer folds, or cv=None, for folds that cover the range of y evenly."
            )
        return RowsOfTable(X, y, folds, groups, bool(self.fit_intercept), self._loss, mean=True)

    def _box(self, X: Any, y: Array, weight: Array, variance: Array) -> tuple[float, float]:
        return super()._box(X, y, weight / weight.sum(), variance)

    def predict(self, X: Any) -> Any:
        """The mean of y."""
        return like(np.exp(self._scores(X)), X)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """D², the fraction of the deviance that the model explains."""
        mean, y, weight = (as_numpy(part) for part in (self.predict(X), y, sample_weight))
        return float(d2_tweedie_score(y, mean, sample_weight=weight, power=self._power))


class BilevelPoissonRegressor(ScoringMixin, BilevelLogLink):
    """Regression for counts y ≥ 0, whose variance grows with their mean; its penalties are tuned by hypergradients.

    min over w of (1/2N) Σ_i s_i d(y_i, e^(x_i w + b)) + ½ Σ_j α_j w_j², with the Poisson deviance d and N = Σ s_i: the
    objective of scikit-learn's `PoissonRegressor` where all α_j are equal. The penalties are tuned for the deviance on
    held-out rows, and `score` is D².

    {arguments}

    {attributes}

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(200, 10))
    >>> y = rng.poisson(np.exp(1 + X[:, 0] - 0.5 * X[:, 1]))
    >>> model = BilevelPoissonRegressor().fit(X, y)
    >>> model.coef_[:2].round(1).tolist()
    [1.0, -0.5]
    """

    _loss, _power = PoissonDeviance(), 1

    def _check_targets(self, y: Array) -> None:
        if y.min() < 0:
            raise BilevelError(f"y has the value {y.min():.6g}, but counts cannot be negative. Use BilevelRidge.")


class BilevelGammaRegressor(ScoringMixin, BilevelLogLink):
    """Regression for y > 0 with a standard deviation proportional to its mean; penalties are tuned by hypergradients.

    min over w of (1/2N) Σ_i s_i d(y_i, e^(x_i w + b)) + ½ Σ_j α_j w_j², with the Gamma deviance d and N = Σ s_i: the
    objective of scikit-learn's `GammaRegressor` where all α_j are equal. The penalties are tuned for the deviance on
    held-out rows, and `score` is D².

    {arguments}

    {attributes}

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(200, 10))
    >>> y = np.exp(X[:, 0] - X[:, 1]) * rng.gamma(4.0, 0.25, size=200)
    >>> model = BilevelGammaRegressor().fit(X, y)
    >>> model.coef_[:2].round(1).tolist()
    [1.0, -1.0]
    """

    _loss, _power = GammaDeviance(), 2

    def _check_targets(self, y: Array) -> None:
        if y.min() <= 0:
            raise BilevelError(
                f"y has the value {y.min():.6g}, but only positive numbers have a Gamma distribution. Use "
                "BilevelPoissonRegressor if some are zero, BilevelRidge if some are negative."
            )
