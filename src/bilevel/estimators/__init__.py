"""scikit-learn estimators whose penalties are tuned by hypergradients: one penalty, or one per feature."""

import lazy_loader

from bilevel import extras

extras.require("sklearn", "scipy", extra="table", purpose="bilevel.estimators")

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "additive": ["BilevelAdditiveClassifier", "BilevelAdditiveRegressor"],
        "elastic_net": ["BilevelElasticNet", "BilevelLasso"],
        "log_link": ["BilevelGammaRegressor", "BilevelPoissonRegressor"],
        "logistic_regression": ["BilevelLogisticRegression"],
        "ridge": ["BilevelRidge"],
    },
)
