"""A script that fits estimators, as a user's would, for tests that start it under torchrun: `FOLDER CASES`.

Each process writes what it found to FOLDER/RANK.json, every number in hexadecimal, and how many parts it worked on.
Two hyperiterations each: results that differ between processes differ after the first one already.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
from scipy import sparse

import bilevel as bl
from bilevel.estimators import (
    BilevelElasticNet,
    BilevelLasso,
    BilevelLogisticRegression,
    BilevelPoissonRegressor,
    BilevelRidge,
)
from bilevel.methods.linear_models import _shared_work, newton_linear, stale_newton

RANK = int(os.environ.get("RANK", "0"))


def table(rows, features, outputs=1):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(rows, features))
    return X, X[:, :4] @ rng.normal(size=(4, outputs)) + rng.gumbel(size=(rows, outputs))


def logistic(rows=300, features=30, outputs=1, **settings):
    X, scores = table(rows, features, outputs)
    y = scores.argmax(1) if outputs > 1 else (scores[:, 0] > 0).astype(int)
    return BilevelLogisticRegression(**{"cv": 5, "max_iter": 2, **settings}).fit(X, y)


def sparse_logistic():
    X, scores = table(240, 280)
    X[np.abs(X) < 1] = 0
    return BilevelLogisticRegression("shared", cv=3, max_iter=2).fit(sparse.csr_matrix(X), scores[:, 0] > 0)


def regression(estimator, rows=120, features=30, outputs=1):
    X, y = table(rows, features, outputs)
    return estimator.set_params(max_iter=2).fit(X, y if outputs > 1 else y[:, 0])


def poisson():
    X, scores = table(300, 30)
    return BilevelPoissonRegressor(cv=5, max_iter=2).fit(X, np.exp(scores[:, 0] / 4).round())


# Tables for which the estimators build every Hessian at most; the table of "stale" is larger.
LARGEST = 1.2e6
CASES = {
    "stale": logistic,
    "classes": lambda: logistic(150, 12, 3),
    "dense": lambda: logistic(200, 12, scoring="accuracy"),
    "sparse": sparse_logistic,
    "span": lambda: logistic(60, 100),
    "poisson": poisson,
    "ridge": lambda: regression(BilevelRidge(cv=4)),
    "targets": lambda: regression(BilevelRidge(cv=4, alpha_per_target=True), outputs=2),
    "left-out": lambda: regression(BilevelRidge()),
    "kernel": lambda: regression(BilevelRidge(cv=3), 40, 90),
    "lasso": lambda: regression(BilevelLasso(cv=4)),
    "wide lasso": lambda: regression(BilevelLasso("shared", cv=3), 60, 3100),
    "ratios": lambda: regression(BilevelElasticNet("shared", l1_ratio=[0.3, 0.9], cv=3, n_jobs=2)),
    "tuned ratio": lambda: regression(BilevelElasticNet("shared", l1_ratio="tuned", cv=3)),
    # Of a usual size.
    "large": lambda: logistic(1500, 70),
}


def failing():
    """A fit in which one process meets an error."""

    def fails(matrices):
        if RANK == 1:
            raise bl.BilevelError("The matrices of rank 1 are out of order.")
        return factorised(matrices)

    factorised, stale_newton.factorised = stale_newton.factorised, fails
    try:
        logistic()
    except bl.BilevelError as error:
        return {"error": str(error)}
    finally:
        stale_newton.factorised = factorised


def digits(model):
    names = ("alpha_", "coef_", "intercept_", "tether_", "cv_score_")
    found = [np.ravel(getattr(model, name)) for name in names if hasattr(model, name)]
    if hasattr(model, "history_"):
        found += [model.history_["value"], model.history_["gradient_norm"]]
    return [float(x).hex() for part in found for x in part]


def run(case, least_operations=1):
    """The numbers of a case, and the number of parts that this process worked on.

    Args:
        least_operations: the smallest work that is divided. 1 divides all that can be, so that small tables test it.
    """
    done, shared, least = {"parts": 0}, _shared_work.shared, _shared_work.LEAST_OPERATIONS
    largest, newton_linear.LARGEST = newton_linear.LARGEST, LARGEST

    def counted(work, count, like):
        def one(number):
            done["parts"] += count > 1
            return work(number)

        return shared(one, count, like)

    modules = [module for name, module in sys.modules.items() if name.startswith("bilevel.methods.linear_models.")]
    modules = [module for module in modules if getattr(module, "shared", None) is shared]
    _shared_work.LEAST_OPERATIONS = least_operations
    for module in modules:
        module.shared = counted
    try:
        if case == "failing":
            return failing()
        model = CASES[case]()
        return {"numbers": digits(model), "method": getattr(model, "method_", ""), **done}
    finally:
        _shared_work.LEAST_OPERATIONS, newton_linear.LARGEST = least, largest
        for module in modules:
            module.shared = shared


if __name__ == "__main__":
    usual = _shared_work.LEAST_OPERATIONS
    found = {case: run(case, usual if case == "large" else 1) for case in sys.argv[2].split(",")}
    Path(sys.argv[1], f"{RANK}.json").write_text(json.dumps(found))
