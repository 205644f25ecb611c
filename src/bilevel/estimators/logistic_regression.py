"""Logistic regression with as many penalties as features."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.special import log_softmax, softmax
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data
from typing_extensions import Self

from bilevel.errors import BilevelError
from bilevel.estimators.base import BilevelEstimator
from bilevel.estimators.criterion import Criterion
from bilevel.estimators.folds import Array, Folds
from bilevel.estimators.gram_criterion import newton_criterion
from bilevel.estimators.linear_problem import LinearProblem
from bilevel.estimators.losses import LogLoss


class BilevelLogisticRegression(ClassifierMixin, BilevelEstimator):
    """Logistic regression, binary or multinomial, whose penalties are tuned by hypergradients.

    min over w of Σ_i s_i log-loss(x_i w + b, y_i) + ½ Σ_j α_j ‖w_j‖², the objective of scikit-learn's
    `LogisticRegression(C=1/α)` where all α_j are equal. The penalties are tuned for the log-loss on held-out rows.

    {arguments}

    {attributes}
        classes_: the classes.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(120, 20))
    >>> y = np.where(X[:, 0] + 0.3 * rng.normal(size=120) > 0, "yes", "no")
    >>> model = BilevelLogisticRegression().fit(X, y)
    >>> model.predict(X[:2]).shape, int(np.argmin(model.alpha_))
    ((2,), 0)
    """

    _classes = True

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Tune the penalties, then train on all rows with them; a row of weight 2 counts as two rows."""
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(y)
        weight = self._weights(sample_weight, X)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(np.unique(codes[weight > 0])) < 2:
            single = self.classes_.tolist()[codes[weight > 0][0]]
            raise BilevelError(f"y holds one class only, {single!r}; a classifier needs two or more.")
        indicators = np.eye(len(self.classes_))[codes]
        outputs = indicators if len(self.classes_) > 2 else indicators[:, 1:]
        coef, intercept = self._tune(X, codes, weight, outputs)
        self.coef_, self.intercept_ = coef.T, intercept
        return self

    def decision_function(self, X: Any) -> Array:
        scores = self._scores(X)
        return scores if len(self.classes_) > 2 else scores[:, 0]

    def predict_proba(self, X: Any) -> Array:
        return softmax(self._all_scores(X), axis=1)

    def predict_log_proba(self, X: Any) -> Array:
        return log_softmax(self._all_scores(X), axis=1)

    def _all_scores(self, X: Any) -> Array:
        """One for every class; of two, the first has a score of 0."""
        scores = self._scores(X)
        return scores if len(self.classes_) > 2 else np.hstack([0 * scores, scores])

    def predict(self, X: Any) -> Array:
        scores = self.decision_function(X)
        return self.classes_[scores.argmax(1) if scores.ndim == 2 else (scores > 0).astype(int)]

    def _criterion(self, X: Any, y: Array, folds: Folds) -> Criterion:
        if self.fit_intercept:
            self._check_folds(y, folds)
        return newton_criterion(LinearProblem(X, y, folds, LogLoss(), free=self.fit_intercept))

    def _check_folds(self, y: Array, folds: Folds) -> None:
        """Refuse folds that are judged on a class which they were not trained on: an intercept, which no penalty holds,
        makes its probability 0, and their loss infinite."""
        indicators = y if y.shape[1] > 1 else np.hstack([1 - y, y])
        trained, judged = folds.train_weights() @ indicators > 0, folds.val_weights() @ indicators > 0
        for k, c in np.argwhere(judged & ~trained):
            raise BilevelError(
                f"Fold {k} of cv is judged on class {self.classes_.tolist()[c]!r} and has no row of it with a positive "
                "weight to train on. Pass fewer folds or a stratified splitter; every class needs two rows or more."
            )
