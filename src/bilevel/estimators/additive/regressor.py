"""Additive regression."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from sklearn.base import RegressorMixin
from typing_extensions import Self

from bilevel.errors import BilevelError
from bilevel.estimators.additive.base import inverse_hessian
from bilevel.estimators.additive.columns import read_columns
from bilevel.estimators.additive.criteria import RowByRow, TunedPenalties
from bilevel.estimators.additive.effects import BAND_FACTOR, AdditiveEffects
from bilevel.estimators.additive.intervals import coverages, tuning_factors
from bilevel.estimators.additive.reduction import Reduction
from bilevel.estimators.additive.tuning import grouped
from bilevel.estimators.base import ScoringMixin
from bilevel.estimators.folds import Array
from bilevel.estimators.tables import HeldOutScores
from bilevel.structures.losses import SquaredError


class BilevelAdditiveRegressor(ScoringMixin, RegressorMixin, AdditiveEffects):
    """y ≈ b + Σ_j f_j(x_j) + Σ_(j,k) f_jk(x_j, x_k): smooth curves, categories and pairs, all penalties tuned together.

    Every numeric column has a penalised spline, with a shrinkage penalty for its slope and a roughness penalty for its
    curve. The effects of a categorical column have a ridge penalty. Missing values have an effect of their own. Pairs
    of columns are tensor products with their own penalties. The penalties minimise the squared leave-one-out error,
    which has a closed form, as its gradient has; or that of folds.

    {arguments}

    {attributes}

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(-2, 2, size=(200, 3))
    >>> y = np.sin(2 * X[:, 0]) + X[:, 1] ** 2 + 0.1 * rng.normal(size=200)
    >>> model = BilevelAdditiveRegressor().fit(X, y)
    >>> bool(model.score(X, y) > 0.98), max(model.importance_, key=model.importance_.get)
    (True, 'x1')
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> Self:
        """Tune the penalties, then fit all rows.

        Args:
            sample_weight: the weight of every row, in the fit and in the criterion.
            groups: the group of every row. No fold trains on one row of a group and is evaluated on another.
        """
        names, columns = read_columns(self, X, self.categorical, reset=True)
        y = self._target(y, columns).astype(np.float64)
        weight = self._weights(sample_weight, columns[0])
        mean = float(weight @ y / weight.sum())
        folds = self._folds(columns, y, weight, groups)
        held_out = self._tune(names, columns, (y - mean)[:, None], weight, SquaredError(), folds)
        self.intercept_ = mean
        self._set_cv_score([(rows, scores + mean) for rows, scores in held_out], X, y, sample_weight)
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The mean of y. With `return_std`, also the standard deviation of y about this mean."""
        mean = self._scores(X)[:, 0]
        return (mean, self._deviation * self._relative_deviation(X)) if return_std else mean

    def predict_interval(self, X: Any, coverage: float = 0.9) -> Array:
        """Lower and upper ends, of shape rows × 2, of intervals that contain y with about this probability.

        The half width is a quantile of the errors of held-out rows, each divided by the relative standard deviation of
        its row, times that of the new row. This assumes neither a normal distribution nor a perfect fit, only that new
        rows have the same distribution as the training rows; a row of weight 2 counts as two. If rows are in groups,
        the new rows are of new groups. The errors are those without the row in the tuning, to first order; that pairs
        were chosen on the same rows is not included. So of few rows with many columns, intervals are too narrow.
        """
        if not 0 < coverage < 1:
            raise BilevelError(f"coverage={coverage!r} is not a probability. Pass a number between 0 and 1.")
        mean, rank = self.predict(X), int(np.searchsorted(self._coverages, coverage - 1e-12))
        if rank == len(self._errors):
            raise BilevelError(
                f"coverage={coverage!r} needs more rows: the width is a quantile of the errors of {rank} held-out "
                f"rows. Pass at most {math.floor(1000 * self._coverages[-1]) / 1000}."
            )
        half_width = self._errors[rank] * self._relative_deviation(X)
        return np.column_stack([mean - half_width, mean + half_width])

    def _relative_deviation(self, X: Any) -> Array:
        """√(1 + 1/Σs + x A⁻¹ xᵀ): the standard deviation of y relative to that of the noise.

        Values far outside the training range are not clipped here. So the uncertainty grows there, although the effects
        are constant.
        """
        reduced = self._reduction.rotated(self._features(X, reach=np.inf))
        return np.sqrt(1 + self._own + ((reduced @ self._inverse) * reduced).sum(1))

    def _keep_covariance(self, all_rows: RowByRow, tuned: TunedPenalties, reduction: Reduction, alpha: Array) -> None:
        X, weight = all_rows.X, all_rows.weight
        self._inverse = inverse_hessian(X, weight, alpha)
        self._inverses, self._points_are_residuals = inverse_hessian(X, weight, alpha / BAND_FACTOR)[None], True
        leverage = weight * ((X @ self._inverse) * X).sum(1) + weight / all_rows.total
        residual, complement = all_rows.outputs[:, 0] - X @ tuned.w[0].numpy(), np.maximum(1 - leverage, 1e-12)
        errors = residual / np.sqrt(complement)
        self._residuals, self._own = residual[:, None], 1 / all_rows.total
        factors: Any = 1.0
        if tuned.tether is not None:
            groups = grouped(reduction.pieces)[0]
            factors = tuning_factors(X @ self._inverse, complement, residual / complement, weight, alpha, groups, tuned)
        self._set_errors(errors * factors, weight)
        self._deviation = float(np.sqrt(weight @ errors**2 / all_rows.total))
        self.degrees_of_freedom_ = float(leverage.sum())

    def _set_errors(self, errors: Array, weight: Array) -> None:
        order = np.argsort(np.abs(errors), kind="stable")
        self._errors, self._coverages = np.abs(errors)[order], coverages(weight[order])

    def _widen_intervals(self, outputs: Array, features: Array, weight: Array, held_out: HeldOutScores) -> None:
        spread = np.sqrt(1 + self._own + ((features @ self._inverse) * features).sum(1))
        errors = np.concatenate([(outputs[rows, 0] - scores[:, 0]) / spread[rows] for rows, scores in held_out])
        weights = np.concatenate([weight[rows] for rows, _ in held_out])
        self._set_errors(errors, weights)
        self._deviation = float(np.sqrt(weights @ errors**2 / weights.sum()))
