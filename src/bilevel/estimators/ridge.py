"""Ridge regression with as many penalties as features."""

from __future__ import annotations

from typing import Any

from sklearn.base import RegressorMixin

from bilevel.estimators.base import BilevelRegressor
from bilevel.estimators.folds import Array, Folds
from bilevel.estimators.hyperparameters import Grouping
from bilevel.estimators.rows_left_out import RowsLeftOut, affordable
from bilevel.estimators.rows_of_table import RowsOfTable
from bilevel.estimators.sums_of_table import SumsOfTable
from bilevel.estimators.tables import LARGEST, FoldedTable
from bilevel.structures.losses import SquaredError


class BilevelRidge(RegressorMixin, BilevelRegressor):
    """Ridge regression whose penalties are tuned by hypergradients.

    min over w of Σ_i s_i (y_i − x_i w − b)² + Σ_j α_j ‖w_j‖², the objective of scikit-learn's `Ridge` where all α_j are
    equal. The penalties are tuned for the squared error on held-out rows.

    {arguments}

    {attributes}

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(80, 40))
    >>> y = X[:, 0] - X[:, 1] + 0.1 * rng.normal(size=80)
    >>> model = BilevelRidge().fit(X, y)
    >>> bool(model.alpha_[2:].min() > 10 * model.alpha_[:2].max())
    True
    """

    def _table(self, X: Any, y: Array, folds: Folds, groups: Grouping, one_by_one: bool) -> FoldedTable:
        rows, features = X.shape
        arguments = X, y, folds, groups, bool(self.fit_intercept)
        # Where there are more penalties than rows, they can fit every left-out row by heart; folds hold them better.
        if one_by_one and groups.count <= rows and affordable(X.shape):
            return RowsLeftOut(*arguments)
        return SumsOfTable(*arguments) if features <= min(rows, LARGEST) else RowsOfTable(*arguments, SquaredError())
