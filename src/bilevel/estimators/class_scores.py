"""Predictions of a classifier from the scores of its classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import log_softmax, softmax
from sklearn.base import ClassifierMixin
from sklearn.utils.class_weight import compute_sample_weight

from bilevel.errors import BilevelError
from bilevel.estimators.folds import Array, Folds
from bilevel.estimators.tensors import like


class ClassScores(ClassifierMixin):
    """Predictions from `_scores`, of shape rows × outputs: one output for two classes, otherwise one per class."""

    classes_: Array
    class_weight: Any

    if TYPE_CHECKING:  # defined by the other base class

        def _scores(self, X: Any) -> Array: ...

    def _with_class_weights(self, y: Array, weight: Array) -> Array:
        """The weights of the rows times those of their classes. For "balanced", a row counts by its weight."""
        if not isinstance(self.class_weight, str) or self.class_weight != "balanced":
            return weight if self.class_weight is None else weight * compute_sample_weight(self.class_weight, y)
        codes = np.unique(y, return_inverse=True)[1]
        totals = np.bincount(codes, weight)
        mean = totals.sum() / (totals > 0).sum()
        balanced: Array = weight * (mean / np.where(totals > 0, totals, 1.0))[codes]
        return balanced

    def _indicators(self, y: Any, weight: Array) -> tuple[Array, Array]:
        """The index of every row's class, and the indicators that are fitted. Sets `classes_`."""
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(np.unique(codes[weight > 0])) < 2:
            single = self.classes_.tolist()[codes[weight > 0][0]]
            raise BilevelError(
                f"y holds only one class with a positive weight, {single!r}. A classifier needs two or more."
            )
        indicators = np.eye(len(self.classes_))[codes]
        return codes, indicators if len(self.classes_) > 2 else indicators[:, 1:]

    def _refuse_untrained_classes(self, indicators: Array, folds: Folds) -> None:
        """Refuse folds that are evaluated on a class without training rows.

        The intercept is not penalised, so the probability of that class would be 0 and the log-loss infinite.
        """
        if indicators.shape[1] == 1:
            indicators = np.hstack([1 - indicators, indicators])
        trained, evaluated = folds.train_weights() @ indicators > 0, folds.val_weights() @ indicators > 0
        for k, c in np.argwhere(evaluated & ~trained):
            raise BilevelError(
                f"Fold {k} of cv is evaluated on class {self.classes_.tolist()[c]!r} but has no row of it with a "
                "positive weight to train on. Pass fewer folds or a stratified splitter. Every class needs at least "
                "two rows."
            )

    def decision_function(self, X: Any) -> Any:
        scores = self._scores(X)
        return like(scores if len(self.classes_) > 2 else scores[:, 0], X)

    def predict_proba(self, X: Any) -> Any:
        return like(softmax(self._all_scores(X), axis=1), X)

    def predict_log_proba(self, X: Any) -> Any:
        return like(log_softmax(self._all_scores(X), axis=1), X)

    def _all_scores(self, X: Any) -> Array:
        """One score per class. With two classes, the first has the score 0."""
        scores = self._scores(X)
        return scores if len(self.classes_) > 2 else np.hstack([0 * scores, scores])

    def predict(self, X: Any) -> Any:
        best = self._all_scores(X).argmax(1)
        return like(self.classes_[best], X)
