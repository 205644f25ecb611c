"""Ridge regression with as many penalties as features."""

from __future__ import annotations

from typing import Any

from sklearn.base import RegressorMixin

from bilevel.estimators.base import BilevelRegressor
from bilevel.estimators.criterion import Criterion
from bilevel.estimators.folds import Array, Folds
from bilevel.estimators.hyperparameters import is_shared
from bilevel.estimators.linear_problem import LinearProblem
from bilevel.estimators.losses import SquaredError
from bilevel.estimators.newton_criterion import NewtonCriterion
from bilevel.estimators.ridge_criterion import KernelEquations, NormalEquations

# The largest matrix that is factorised; beyond it conjugate gradients are faster and need no such matrix.
LARGEST = 3000


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

    def _criterion(self, X: Any, y: Array, folds: Folds) -> Criterion:
        rows, features = X.shape
        if min(rows, features) > LARGEST:
            return NewtonCriterion(LinearProblem(X, y, folds, SquaredError(), free=self.fit_intercept))
        if features <= rows:
            return NormalEquations.of(X, y, folds, self.fit_intercept, is_shared(self.penalty))
        return KernelEquations(X, y, folds, self.fit_intercept)
