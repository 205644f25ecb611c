"""Additive classification."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from sklearn.utils.multiclass import check_classification_targets
from typing_extensions import Self

from bilevel.estimators.additive.columns import read_columns
from bilevel.estimators.additive.criteria import RowByRow, TunedPenalties
from bilevel.estimators.additive.effects import BAND_FACTOR, AdditiveEffects
from bilevel.estimators.additive.reduction import Reduction
from bilevel.estimators.additive.tuning import grouped
from bilevel.estimators.base import ScoringMixin
from bilevel.estimators.class_scores import ClassScores
from bilevel.estimators.folds import Array, Folds
from bilevel.methods.linear_models.newton_linear import PenalisedRows
from bilevel.structures.linear_models import LinearModels
from bilevel.structures.losses import LogLoss


@dataclass(eq=False, repr=False)
class BilevelAdditiveClassifier(ScoringMixin, ClassScores, AdditiveEffects):
    """log-odds = b + Σ_j f_j(x_j) + Σ_(j,k) f_jk(x_j, x_k), binary or multinomial, all penalties tuned together.

    The terms are those of `BilevelAdditiveRegressor`. With more than two classes, every class has its own effects, and
    the classes share the penalties. The penalties minimise the leave-one-out log-loss, which is approximated by one
    Newton step for each row that is left out; or the log-loss of folds, without this approximation.

    {arguments}
        class_weight: a dict from class to weight, or "balanced" for weights with the same total in every class. They
            multiply the sample weights, in the fit and in the criterion.

    {attributes}
        classes_: the classes, sorted.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(-2, 2, size=(300, 2))
    >>> y = np.where(X[:, 0] ** 2 + 0.3 * rng.normal(size=300) > 1.3, "far", "near")
    >>> model = BilevelAdditiveClassifier().fit(X, y)
    >>> bool(model.score(X, y) > 0.88), max(model.importance_, key=model.importance_.get)
    (True, 'x0')
    """

    _: KW_ONLY
    class_weight: Any = None

    def fit(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> Self:
        """Tune the penalties, then fit all rows.

        Args:
            sample_weight: the weight of every row, in the fit and in the criterion.
            groups: the group of every row. No fold trains on one row of a group and is evaluated on another.
        """
        names, columns = read_columns(self, X, self.categorical, reset=True)
        y = self._target(y, columns)
        check_classification_targets(y)
        weight = self._weights(sample_weight, columns[0])
        weight = self._with_class_weights(y, weight)
        codes, outputs = self._indicators(y, weight)
        folds = self._folds(columns, codes, weight, groups)
        held_out = self._tune(names, columns, outputs, weight, LogLoss(), folds)
        self._set_cv_score(held_out, X, y, sample_weight)
        return self

    def _check_folds(self, folds: Folds, outputs: Array) -> None:
        self._refuse_untrained_classes(outputs, folds)

    def _keep_covariance(self, all_rows: RowByRow, tuned: TunedPenalties, reduction: Reduction, alpha: Array) -> None:
        """Set the covariance of every output's coefficients, for the bands of the effects."""
        model = all_rows.problem(grouped(reduction.pieces)[0]).inner
        assert isinstance(model, LinearModels)
        rows = PenalisedRows(model, all_rows.train, tuned.lam - math.log(BAND_FACTOR))
        inverse = torch.linalg.inv(rows.hessians(rows.scores(tuned.inner))[0]).numpy()
        size = len(alpha)
        starts = range(0, len(inverse), size + 1)
        self._inverses = np.stack([inverse[at : at + size, at : at + size] for at in starts])
        self._deviation, self._points_are_residuals = 1.0, False
        self._residuals = np.zeros((len(all_rows.weight), len(self._inverses)))
