"""Ridge regression with as many penalties as features."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy import sparse
from sklearn.base import RegressorMixin
from sklearn.utils.validation import validate_data
from torch import Tensor

from bilevel.errors import BilevelError
from bilevel.estimators.base import BilevelRegressor, Scored
from bilevel.estimators.folds import Array, Folds, whole
from bilevel.estimators.hyperparameters import Grouping
from bilevel.estimators.rows_left_out import RowsLeftOut, affordable
from bilevel.estimators.rows_of_table import RowsOfTable
from bilevel.estimators.search import PenaltySearch
from bilevel.estimators.sums_of_table import SumsOfTable
from bilevel.estimators.tables import LARGEST, MOST, FoldedTable
from bilevel.estimators.tensors import as_numpy, like
from bilevel.structures.losses import SquaredError
from bilevel.thread_pool import map_in_threads, thread_count

# Up to so many features, the matrix that standard deviations need is kept.
REMEMBERED = 1000


class BilevelRidge(Scored, RegressorMixin, BilevelRegressor):
    """Ridge regression whose penalties are tuned by hypergradients.

    min over w of Σ_i s_i (y_i − x_i w − b)² + Σ_j α_j ‖w_j‖², the objective of scikit-learn's `Ridge` where all α_j are
    equal. The penalties are tuned for the squared error on held-out rows.

    {arguments}
        alpha_per_target: tune the penalties of every column of y for itself. `alpha_` and `tether_` then begin with an
            axis of targets, and what else is known of a target is in `estimators_`.

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

    def __init__(
        self,
        penalty: Any = "per-feature",
        *,
        alpha_per_target: bool = False,
        cv: Any = None,
        tether: Any = "auto",
        fit_intercept: bool = True,
        max_iter: int = 100,
        tol: float = 1e-5,
        warm_start: bool = False,
        random_state: Any = 0,
        scoring: Any = None,
        n_jobs: int | None = None,
        verbose: bool | None = None,
    ) -> None:
        super().__init__(
            penalty,
            cv=cv,
            tether=tether,
            fit_intercept=fit_intercept,
            max_iter=max_iter,
            tol=tol,
            warm_start=warm_start,
            random_state=random_state,
            scoring=scoring,
            n_jobs=n_jobs,
            verbose=verbose,
        )
        self.alpha_per_target = alpha_per_target

    def _folds(self, X: Any, y: Array, weight: Array, groups: Grouping, rows: Any) -> Folds:
        # Where there are more penalties than rows, they can fit every left-out row by heart; folds hold them better.
        self._one_by_one = self.cv is None and rows is None and groups.count <= len(y) and affordable(X.shape)
        return whole(weight) if self._one_by_one else super()._folds(X, y, weight, groups, rows)

    def _table(self, X: Any, y: Array, folds: Folds, groups: Grouping) -> FoldedTable:
        rows, features = X.shape
        arguments = X, y, folds, groups, bool(self.fit_intercept)
        if self._one_by_one:
            return RowsLeftOut(*arguments)
        return SumsOfTable(*arguments) if features <= min(rows, LARGEST) else RowsOfTable(*arguments, SquaredError())

    def _fit(self, X: Any, y: Array, sample_weight: Any, groups: Any) -> None:
        if not self.alpha_per_target or y.ndim == 1:
            super()._fit(X, y, sample_weight, groups)
            return
        again = bool(self.warm_start) and len(getattr(self, "estimators_", ())) == y.shape[1]
        settings = {**self.get_params(deep=False), "alpha_per_target": False, "n_jobs": None}
        models = self.estimators_ if again else [type(self)() for _ in y.T]

        def fitted(target: int) -> Any:
            return models[target].set_params(**settings).fit(X, y[:, target], sample_weight, groups)

        with self._progress() as advance:
            self.estimators_: list[Any] = []
            for model in map_in_threads(fitted, range(y.shape[1]), thread_count(self.n_jobs)):
                self.estimators_.append(model)
                advance(sum(one.n_iter_ for one in self.estimators_), model.history_["value"][-1])
        for name in ("alpha_", "tether_", "coef_", "intercept_", *(["cv_score_"] if self.scoring is not None else [])):
            setattr(self, name, np.stack([getattr(model, name) for model in self.estimators_]))
        self.n_iter_ = sum(model.n_iter_ for model in self.estimators_)

    def _spread(self, fit: PenaltySearch, lam: Tensor, X: Any, residual: Array, centre: Array, scale: Array) -> Any:
        """σ, A⁻¹, the mean of the rows, and the share of the intercept.

        The error on row i of the fit to all others is r_i / (1 − h_i), with its residual and leverage, and its variance
        is σ² / (1 − h_i). So σ² is the mean of r_i² / (1 − h_i): what makes the deviations right for rows left out.
        """
        weight, size = fit.folds.weight, X.shape[1]
        total = float(weight.sum())
        if size > REMEMBERED:
            return None
        units = torch.eye(size, fit.w.shape[2], dtype=lam.dtype)
        # The block of an intercept is left out: it has been eliminated from the others.
        inverse = fit.minimum(lam).solve(units[None, :, None])[0, :, 0, :size].numpy()
        own = float(bool(self.fit_intercept))
        mean = np.asarray(weight @ X).reshape(-1) / total * own
        some = np.flatnonzero(weight > 0)
        some = some[:: -(-len(some) // MOST)]
        rows, share = (X[some].toarray() if sparse.issparse(X) else X[some]) - mean, weight[some]
        kept = 1 - share * (own / total + ((rows @ inverse) * rows).sum(1))
        squares = residual[some] ** 2 / np.maximum(kept, 1e-12)[:, None]
        deviation = np.sqrt(share @ squares / share.sum())
        return deviation, inverse / np.outer(scale, scale), centre + mean * scale, own / total

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The mean of y; with `return_std`, also the standard deviation of y about it.

        That is σ √(1 + 1/Σs + x A⁻¹ xᵀ) with A = XᵀSX + diag(α) and rows about their mean, as in Bayesian ridge
        regression at these penalties; their own uncertainty is left out. σ is such that rows left out fit.
        """
        mean = super().predict(X)
        if not return_std:
            return mean
        several = hasattr(self, "estimators_") and self.alpha_per_target
        parts = [model._deviations(X) for model in self.estimators_] if several else [self._deviations(X)]
        spread = np.column_stack(parts)
        return mean, like(spread if mean.ndim == 2 else spread[:, 0], X)

    def _deviations(self, X: Any) -> Array:
        """The standard deviation of y, rows × outputs."""
        self._settle()
        if self._settled["spread"] is None:
            raise BilevelError(
                f"return_std=True needs a matrix of features × features, which is kept for at most {REMEMBERED} "
                f"features; this table has {self.n_features_in_}. Call predict without it."
            )
        X = validate_data(self, as_numpy(X), accept_sparse="csr", dtype=np.float64, reset=False)
        deviation, inverse, mean, own = self._settled["spread"]
        away = (X.toarray() if sparse.issparse(X) else X) - mean
        return np.sqrt(1 + own + ((away @ inverse) * away).sum(1))[:, None] * deviation
