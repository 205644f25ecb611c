"""Additive models: a curve for every column of numbers, a block for every column of categories, and pairs."""

from bilevel.estimators.additive.classifier import BilevelAdditiveClassifier
from bilevel.estimators.additive.regressor import BilevelAdditiveRegressor

__all__ = ["BilevelAdditiveClassifier", "BilevelAdditiveRegressor"]
