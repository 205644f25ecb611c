"""scikit-learn estimators whose penalties, one or thousands, are tuned by hypergradients."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "elastic_net": ["BilevelElasticNet"],
        "logistic_regression": ["BilevelLogisticRegression"],
        "ridge": ["BilevelRidge"],
    },
)
