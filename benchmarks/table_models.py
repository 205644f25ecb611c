"""The models of `benchmarks/tables.py`: ours, and the rivals with the settings of the first example in their
documentation."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from sklearn.base import BaseEstimator
from sklearn.compose import make_column_transformer
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.feature_selection import VarianceThreshold
from sklearn.impute import SimpleImputer
from sklearn.linear_model import ARDRegression, ElasticNetCV, LassoCV, LogisticRegressionCV, RidgeCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler

from bilevel.estimators import (
    BilevelAdditiveClassifier,
    BilevelAdditiveRegressor,
    BilevelElasticNet,
    BilevelLasso,
    BilevelLogisticRegression,
    BilevelRidge,
)

Build = Callable[[pd.DataFrame], Any]
DEFAULT = "BilevelAdditive"
OURS = (DEFAULT, "BilevelRidge", "BilevelElasticNet", "BilevelLogisticRegression")
ALPHAS = np.logspace(-3, 5, 33)
# The constant prediction. A model that fails or takes too long is counted as this model.
CONSTANT = "constant"


def _text(X: pd.DataFrame) -> list[str]:
    return [name for name in X if not pd.api.types.is_numeric_dtype(X[name])]


def prepared(X: pd.DataFrame, *, scale: bool = True) -> Any:
    """The preprocessing for linear models, forests and pyGAM.

    Missing numbers are replaced by medians, categories by indicators, and all columns are standardised if `scale`.
    """
    text = _text(X)
    numbers = [name for name in X if name not in text]
    columns = make_column_transformer(
        (SimpleImputer(strategy="median", keep_empty_features=True), numbers),
        (make_pipeline(SimpleImputer(strategy="constant", fill_value="?"),
                       OneHotEncoder(handle_unknown="ignore", sparse_output=False, drop="if_binary")), text),
    )  # fmt: skip
    return make_pipeline(columns, VarianceThreshold(), *([StandardScaler()] if scale else []))


def with_features(model: Any, scale: bool = True) -> Build:
    return lambda X: make_pipeline(prepared(X, scale=scale), model())


def as_categories(X: pd.DataFrame) -> pd.DataFrame:
    """The table with text columns as pandas categories. Missing values stay, because boosting accepts both."""
    return X.astype(dict.fromkeys(_text(X), "category"))


def boosting(model: Any) -> Build:
    return lambda X: make_pipeline(FunctionTransformer(as_categories), model)


def ebm(classes: bool) -> Build:
    def build(X: pd.DataFrame) -> Any:
        from interpret.glassbox import ExplainableBoostingClassifier, ExplainableBoostingRegressor

        kind = ExplainableBoostingClassifier if classes else ExplainableBoostingRegressor
        return kind(n_jobs=1, random_state=0)

    return build


class PyGAM(BaseEstimator):
    """pyGAM with its grid search over one smoothing penalty. For three or more classes, it fits one model per class
    against the rest."""

    def __init__(self, classes: bool = False) -> None:
        self.classes = classes

    def fit(self, X: Any, y: Any) -> PyGAM:
        from pygam import LinearGAM, LogisticGAM

        if not self.classes:
            self.models_ = [LinearGAM().gridsearch(X, y, progress=False)]
            return self
        self.classes_ = np.unique(y)
        names = self.classes_[1:] if len(self.classes_) == 2 else self.classes_
        self.models_ = [LogisticGAM().gridsearch(X, (y == name).astype(int), progress=False) for name in names]
        return self

    def predict(self, X: Any) -> np.ndarray:
        return self.models_[0].predict(X)

    def predict_proba(self, X: Any) -> np.ndarray:
        found = np.column_stack([model.predict_mu(X) for model in self.models_])
        found = np.column_stack([1 - found, found]) if found.shape[1] == 1 else found
        return found / np.maximum(found.sum(1, keepdims=True), 1e-12)


class OnOurBasis(BaseEstimator):
    """A model with one ridge penalty on the features of our additive model: curves, categories and pairs."""

    def __init__(self, classes: bool = False) -> None:
        self.classes = classes

    def fit(self, X: Any, y: Any) -> OnOurBasis:
        # Two iterations are enough, because only the basis is used and not the penalties.
        self.basis_ = (BilevelAdditiveClassifier if self.classes else BilevelAdditiveRegressor)(max_iter=2).fit(X, y)
        model = _logistic() if self.classes else RidgeCV(ALPHAS)
        self.model_ = model.fit(self.basis_._features(X), y)
        self.classes_ = getattr(self.model_, "classes_", None)
        return self

    def predict(self, X: Any) -> np.ndarray:
        return self.model_.predict(self.basis_._features(X))

    def predict_proba(self, X: Any) -> np.ndarray:
        return self.model_.predict_proba(self.basis_._features(X))


def _logistic(**settings: Any) -> Any:
    return LogisticRegressionCV(Cs=10, scoring="neg_log_loss", max_iter=1000, **settings)


REGRESSION: dict[str, Build] = {
    CONSTANT: lambda X: DummyRegressor(),
    DEFAULT: lambda X: BilevelAdditiveRegressor(),
    "BilevelRidge": with_features(BilevelRidge),
    "BilevelElasticNet": with_features(BilevelElasticNet),
    "BilevelLasso": with_features(BilevelLasso),
    "BilevelLasso, shared": with_features(lambda: BilevelLasso("shared")),
    "RidgeCV": with_features(lambda: RidgeCV(ALPHAS)),
    "LassoCV": with_features(LassoCV),
    "ElasticNetCV": with_features(ElasticNetCV),
    "ARD": with_features(ARDRegression),
    "pyGAM": with_features(PyGAM),
    "EBM": ebm(classes=False),
    "forest": with_features(lambda: RandomForestRegressor(random_state=0), scale=False),
    "boosting": boosting(HistGradientBoostingRegressor(random_state=0)),
    "RidgeCV, our basis": lambda X: OnOurBasis(),
}
CLASSIFICATION: dict[str, Build] = {
    CONSTANT: lambda X: DummyClassifier(strategy="prior"),
    DEFAULT: lambda X: BilevelAdditiveClassifier(),
    "BilevelLogisticRegression": with_features(BilevelLogisticRegression),
    "LogisticRegressionCV": with_features(_logistic),
    "pyGAM": with_features(lambda: PyGAM(classes=True)),
    "EBM": ebm(classes=True),
    "forest": with_features(lambda: RandomForestClassifier(random_state=0), scale=False),
    "boosting": boosting(HistGradientBoostingClassifier(random_state=0)),
    "LogisticRegressionCV, our basis": lambda X: OnOurBasis(classes=True),
}


def fitted_error(
    build: Build, X: pd.DataFrame, y: np.ndarray, train: np.ndarray, test: np.ndarray, classes: bool
) -> float:
    """The error on the test rows, relative to a constant prediction, whose error is 1.

    For regression it is the mean squared error over that of the training rows' mean. For classification it is the log
    loss over that of the training rows' class frequencies.
    """
    model = build(X.iloc[train])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(X.iloc[train], y[train])
        return relative_error(model, X.iloc[test], y[test], y[train], classes)


def relative_error(model: Any, X: pd.DataFrame, y: np.ndarray, y_train: np.ndarray, classes: bool) -> float:
    if not classes:
        return float(((y - model.predict(X)) ** 2).mean() / ((y - y_train.mean()) ** 2).mean())
    names, counts = np.unique(y_train, return_counts=True)
    codes = np.searchsorted(names, y)
    chances = np.clip(model.predict_proba(X)[np.arange(len(y)), codes], 1e-15, None)
    base = -np.log(counts[codes] / counts.sum()).mean()
    return float(-np.log(chances).mean() / base)
