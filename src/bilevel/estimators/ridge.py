"""Ridge regression with as many penalties as features."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from scipy import sparse
from sklearn.base import RegressorMixin
from sklearn.utils.validation import validate_data
from torch import Tensor

from bilevel.distributed import world
from bilevel.errors import BilevelError
from bilevel.estimators.base import ScoringMixin
from bilevel.estimators.folds import Array, Folds, single_fold
from bilevel.estimators.hyperparameters import Grouping
from bilevel.estimators.regressor_base import BilevelRegressor
from bilevel.estimators.rows_left_out import RowsLeftOut, is_affordable
from bilevel.estimators.rows_of_table import RowsOfTable
from bilevel.estimators.search import PenaltySearch
from bilevel.estimators.sums_of_table import SumsOfTable
from bilevel.estimators.tables import MAX_DENSE_FEATURES, MAX_TETHER_ROWS, FoldedTable
from bilevel.estimators.tensors import as_numpy, like
from bilevel.structures.losses import SquaredError
from bilevel.thread_pool import map_in_threads, thread_count

# Up to this number of features, the matrix for the standard deviations is kept.
MAX_STD_FEATURES = 1000

# With `alpha_per_target`, `estimators_` holds these attributes. Those of an earlier fit are removed.
PER_TARGET = ("_waiting", "_settled", "_last", "history_", "method_", "outcome_", "cv_score_")


@dataclass(eq=False, repr=False)
class BilevelRidge(ScoringMixin, RegressorMixin, BilevelRegressor):
    """Ridge regression whose penalties are tuned by hypergradients.

    min over w of Σ_i s_i (y_i − x_i w − b)² + Σ_j α_j ‖w_j‖², the objective of scikit-learn's `Ridge` where all α_j are
    equal. The penalties are tuned for the squared error on held-out rows.

    {arguments}
        alpha_per_target: whether to tune separate penalties for every column of y. `alpha_` and `tether_` then have a
            first axis for the targets, and `estimators_` holds the other attributes.

    {attributes}
        estimators_: with `alpha_per_target`, the model of every target.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(80, 40))
    >>> y = X[:, 0] - X[:, 1] + 0.1 * rng.normal(size=80)
    >>> model = BilevelRidge().fit(X, y)
    >>> bool(model.alpha_[2:].min() > 10 * model.alpha_[:2].max())
    True
    """

    _: KW_ONLY
    alpha_per_target: bool = False

    def _folds(self, X: Any, y: Array, weight: Array, groups: Grouping, rows: Any) -> Folds:
        # With more penalties than rows, the leave-one-out error can be overfitted completely. Folds overfit less.
        self._leaves_one_out = self.cv is None and rows is None and groups.count <= len(y) and is_affordable(X.shape)
        return single_fold(weight) if self._leaves_one_out else super()._folds(X, y, weight, groups, rows)

    def _table(self, X: Any, y: Array, folds: Folds, groups: Grouping) -> FoldedTable:
        rows, features = X.shape
        arguments = X, y, folds, groups, bool(self.fit_intercept)
        if self._leaves_one_out:
            return RowsLeftOut(*arguments)
        return (
            SumsOfTable(*arguments)
            if features <= min(rows, MAX_DENSE_FEATURES)
            else RowsOfTable(*arguments, SquaredError())
        )

    def _fit(self, X: Any, y: Array, sample_weight: Any, groups: Any) -> None:
        if not self.alpha_per_target or y.ndim == 1:
            self.__dict__.pop("estimators_", None)
            super()._fit(X, y, sample_weight, groups)
            return
        for name in PER_TARGET:
            self.__dict__.pop(name, None)
        again = bool(self.warm_start) and len(getattr(self, "estimators_", ())) == y.shape[1]
        settings = {**self.get_params(deep=False), "alpha_per_target": False, "n_jobs": None}
        models = self.estimators_ if again else [type(self)() for _ in y.T]

        def fit_target(target: int) -> Any:
            return models[target].set_params(**settings).fit(X, y[:, target], sample_weight, groups)

        with world() as everybody, self._progress() as advance:
            self.estimators_: list[Any] = []
            # Several processes work together on one target after the other.
            threads = thread_count(self.n_jobs) if everybody.size == 1 else 1
            for model in map_in_threads(fit_target, range(y.shape[1]), threads):
                self.estimators_.append(model)
                advance(sum(fitted.n_iter_ for fitted in self.estimators_), model.history_["value"][-1])
        for name in ("alpha_", "tether_", "coef_", "intercept_", *(["cv_score_"] if self.scoring is not None else [])):
            setattr(self, name, np.stack([getattr(model, name) for model in self.estimators_]))
        self.n_iter_ = sum(model.n_iter_ for model in self.estimators_)

    def _deviation_parts(
        self, fit: PenaltySearch, lam: Tensor, X: Any, residual: Array, centre: Array, scale: Array
    ) -> Any:
        """σ, A⁻¹, the mean of the rows, and the variance of the intercept relative to σ².

        Let r_i be the residual of row i and h_i its leverage. A fit to all other rows has the error r_i / (1 − h_i) on
        row i, with the variance σ² / (1 − h_i). So σ² is estimated by the mean of r_i² / (1 − h_i).
        """
        weight, size = fit.folds.weight, X.shape[1]
        total = float(weight.sum())
        if size > MAX_STD_FEATURES:
            return None
        units = torch.eye(size, fit.w.shape[2], dtype=lam.dtype)
        # The block of the features alone. In the inverse, this block already accounts for the intercept.
        inverse = fit.minimum(lam).solve(units[None, :, None])[0, :, 0, :size].numpy()
        has_intercept = float(fit.table.intercept)
        mean = np.asarray(weight @ X).reshape(-1) / total * has_intercept
        sample = np.flatnonzero(weight > 0)
        sample = sample[:: -(-len(sample) // MAX_TETHER_ROWS)]
        rows, share = (X[sample].toarray() if sparse.issparse(X) else X[sample]) - mean, weight[sample]
        complement = 1 - share * (has_intercept / total + ((rows @ inverse) * rows).sum(1))
        squares = residual[sample] ** 2 / np.maximum(complement, 1e-12)[:, None]
        deviation = np.sqrt(share @ squares / share.sum())
        return deviation, inverse / np.outer(scale, scale), centre + mean * scale, has_intercept / total

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The mean of y. With `return_std`, also the standard deviation of y about this mean.

        The standard deviation is σ √(1 + 1/Σs + x A⁻¹ xᵀ) with A = XᵀSX + diag(α) and centred rows, as in Bayesian
        ridge regression at these penalties. The uncertainty of the penalties is not included. σ is estimated from the
        leave-one-out errors.
        """
        mean = super().predict(X)
        if not return_std:
            return mean
        several = hasattr(self, "estimators_") and self.alpha_per_target
        parts = [model._deviations(X) for model in self.estimators_] if several else [self._deviations(X)]
        deviations = np.column_stack(parts)
        return mean, like(deviations if mean.ndim == 2 else deviations[:, 0], X)

    def _deviations(self, X: Any) -> Array:
        """The standard deviation of y, rows × outputs."""
        self._settle()
        if self._settled["spread"] is None:
            raise BilevelError(
                f"return_std=True needs a matrix of features × features, which is kept for at most {MAX_STD_FEATURES} "
                f"features. This table has {self.n_features_in_}. Call predict without return_std."
            )
        X = validate_data(self, as_numpy(X), accept_sparse="csr", dtype=np.float64, reset=False)
        deviation, inverse, mean, intercept_variance = self._settled["spread"]
        centred = (X.toarray() if sparse.issparse(X) else X) - mean
        return np.sqrt(1 + intercept_variance + ((centred @ inverse) * centred).sum(1))[:, None] * deviation
