"""Additive models: a curve per numeric column, an effect per category, and interactions of pairs of columns."""

from bilevel.estimators.additive.classifier import BilevelAdditiveClassifier
from bilevel.estimators.additive.regressor import BilevelAdditiveRegressor

__all__ = ["BilevelAdditiveClassifier", "BilevelAdditiveRegressor"]
