"""The base class of the linear estimators with a numeric target."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.utils.validation import validate_data
from typing_extensions import Self

from bilevel.estimators.base import BilevelEstimator
from bilevel.estimators.folds import Array
from bilevel.estimators.tensors import as_numpy, like


class BilevelRegressor(BilevelEstimator):
    """A linear model for a numeric target, with one or several columns."""

    coef_: Any
    intercept_: Any
    _several_targets = True

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.single_output, tags.target_tags.multi_output = False, self._several_targets
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> Self:
        """Tune the penalties, then fit all rows with them.

        Args:
            sample_weight: the weight of every row, in the fit and in the criterion.
            groups: the group of every row. No fold trains on one row of a group and is evaluated on another.
        """
        given, sample_weight, groups = X, as_numpy(sample_weight), as_numpy(groups)
        X, y = validate_data(
            self,
            as_numpy(X),
            as_numpy(y),
            accept_sparse="csr",
            dtype=np.float64,
            y_numeric=True,
            multi_output=self._several_targets,
            ensure_min_samples=2,
        )
        self._fit(X, np.array(y, dtype=np.float64), sample_weight, groups)
        self.coef_, self.intercept_ = like(self.coef_, given), like(self.intercept_, given)
        return self

    def _fit(self, X: Any, y: Array, sample_weight: Any, groups: Any) -> None:
        weight, outputs = self._weights(sample_weight, X), y.reshape(len(y), -1)
        # With an intercept, y is centred as X is. This avoids rounding errors in sums of squares.
        mean = weight @ outputs / weight.sum() * bool(self.fit_intercept)
        tuned = self._tune(X, y, weight, outputs - mean, groups)
        several, intercept = y.ndim == 2, tuned.intercept + mean
        self.coef_ = tuned.coef.T if several else tuned.coef[:, 0]
        self.intercept_ = intercept if several else float(intercept[0])
        held_out = [(rows, scores + mean if several else scores[:, 0] + mean) for rows, scores in tuned.held_out]
        self._set_cv_score(held_out, X, y, sample_weight)

    def predict(self, X: Any) -> Any:
        return like(self._scores(X), X)
