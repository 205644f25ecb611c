"""Logistic regression with as many penalties as features."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data
from typing_extensions import Self

from bilevel.estimators.base import BilevelEstimator, ScoringMixin
from bilevel.estimators.class_scores import ClassScores
from bilevel.estimators.folds import Array, Folds
from bilevel.estimators.hyperparameters import Grouping
from bilevel.estimators.rows_of_table import RowsOfTable
from bilevel.estimators.tables import FoldedTable
from bilevel.estimators.tensors import as_numpy, like
from bilevel.structures.losses import LogLoss


@dataclass(eq=False, repr=False)
class BilevelLogisticRegression(ScoringMixin, ClassScores, BilevelEstimator):
    """Logistic regression, binary or multinomial, whose penalties are tuned by hypergradients.

    min over w of Σ_i s_i log-loss(x_i w + b, y_i) + ½ Σ_j α_j ‖w_j‖², the objective of scikit-learn's
    `LogisticRegression(C=1/α)` where all α_j are equal. The penalties are tuned for the log-loss on held-out rows.

    {arguments}
        class_weight: a dict from class to weight, or "balanced" for weights with the same total in every class. They
            multiply the sample weights, in the fit and in the criterion.

    {attributes}
        classes_: the classes, sorted.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(120, 20))
    >>> y = np.where(X[:, 0] + 0.5 * X[:, 1] + rng.logistic(size=120) > 0, "yes", "no")
    >>> model = BilevelLogisticRegression(penalty=np.repeat([0, 1], [2, 18])).fit(X, y)  # one penalty per group
    >>> bool(model.alpha_[2:].min() > 2 * model.alpha_[:2].max())  # the features of group 1 do not matter
    True
    """

    _classes = True

    _: KW_ONLY
    class_weight: Any = None

    def fit(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> Self:
        """Tune the penalties, then fit all rows with them.

        Args:
            sample_weight: the weight of every row, in the fit and in the criterion.
            groups: the group of every row. No fold trains on one row of a group and is evaluated on another.
        """
        given, y, sample_weight, groups = X, as_numpy(y), as_numpy(sample_weight), as_numpy(groups)
        X, y = validate_data(self, as_numpy(X), y, accept_sparse="csr", dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(y)
        weight = self._weights(sample_weight, X)
        weight = self._with_class_weights(y, weight)
        codes, outputs = self._indicators(y, weight)
        tuned = self._tune(X, codes, weight, outputs, groups)
        self.coef_, self.intercept_ = tuned.coef.T, tuned.intercept
        self._set_cv_score(tuned.held_out, X, y, sample_weight)
        self.coef_, self.intercept_ = like(self.coef_, given), like(self.intercept_, given)
        return self

    def _table(self, X: Any, y: Array, folds: Folds, groups: Grouping) -> FoldedTable:
        if self.fit_intercept:
            self._refuse_untrained_classes(y, folds)
        return RowsOfTable(X, y, folds, groups, bool(self.fit_intercept), LogLoss())
