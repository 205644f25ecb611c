"""Additive regression."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import RegressorMixin
from typing_extensions import Self

from bilevel.errors import BilevelError
from bilevel.estimators.additive.base import inverse_hessian
from bilevel.estimators.additive.columns import read_columns
from bilevel.estimators.additive.effects import DOUBT, AdditiveEffects
from bilevel.estimators.additive.reduction import Reduction
from bilevel.estimators.additive.tuning import LeftOut, TunedPenalties
from bilevel.estimators.folds import Array
from bilevel.structures.losses import SquaredError


class BilevelAdditiveRegressor(RegressorMixin, AdditiveEffects):
    """y ≈ b + Σ_j f_j(x_j) + Σ_(j,k) f_jk(x_j, x_k): smooth curves, categories and pairs, all penalties tuned together.

    Every column of numbers has a penalised spline with a shrinkage penalty for its slope and a roughness penalty for
    its curve, every column of categories a block with a ridge penalty, missing values an effect of their own, and pairs
    tensor products with penalties of their own. The penalties minimise the squared leave-one-out error, which is known
    in closed form with its gradient.

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

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Tune the penalties and fit all rows; a row of weight 2 counts as two rows."""
        names, columns = read_columns(self, X, self.categorical, reset=True)
        y = self._target(y, columns).astype(np.float64)
        weight = self._weights(sample_weight, columns)
        middle = float(weight @ y / weight.sum())
        self._tune(names, columns, (y - middle)[:, None], weight, SquaredError())
        self.intercept_ = middle
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The mean of y; with `return_std`, also the standard deviation of y about it."""
        mean = self._features(X) @ self._coef[0] + self.intercept_
        return (mean, self._deviation * self._stretch(X)) if return_std else mean

    def predict_interval(self, X: Any, coverage: float = 0.9) -> Array:
        """Lower and upper ends, of shape rows × 2, of intervals that hold y with about this probability.

        The half width is a quantile of the leave-one-out errors, each relative to how far its row is from the others,
        times the same factor for the new row. So it assumes neither a normal distribution nor a perfect fit, only that
        new rows come from where the training rows came from.
        """
        if not 0 < coverage < 1:
            raise BilevelError(f"coverage={coverage!r} is not a probability between 0 and 1.")
        mean, count = self.predict(X), len(self._errors)
        rank = min(int(np.ceil((count + 1) * coverage)), count) - 1
        half = self._errors[rank] * self._stretch(X)
        return np.column_stack([mean - half, mean + half])

    def _stretch(self, X: Any) -> Array:
        """√(1 + x A⁻¹ xᵀ): how much less certain a row is than its noise alone.

        Values far outside the training rows count as they are here, so that the uncertainty grows where effects are
        held constant.
        """
        reduced = self._reduction.rotated(self._features(X, reach=np.inf))
        return np.sqrt(1 + self._own + ((reduced @ self._inverse) * reduced).sum(1))

    def _keep_covariance(self, whole: LeftOut, tuned: TunedPenalties, reduction: Reduction, alpha: Array) -> None:
        X, weight = whole.X, whole.weight
        self._inverse = inverse_hessian(X, weight, alpha)
        self._inverses, self._points_are_residuals = inverse_hessian(X, weight, alpha / DOUBT)[None], True
        leverage = weight * ((X @ self._inverse) * X).sum(1) + weight / whole.total
        residual = whole.outputs[:, 0] - X @ tuned.w[0].numpy()
        errors = residual / np.sqrt(np.maximum(1 - leverage, 1e-12))
        self._left = residual[:, None]
        self._errors, self._own = np.sort(np.abs(errors)), 1 / whole.total
        self._deviation = float(np.sqrt(weight @ errors**2 / whole.total))
        self.degrees_of_freedom_ = float(leverage.sum())
