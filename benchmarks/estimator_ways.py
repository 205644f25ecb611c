"""Which way to the criterion is fastest for which size: `python benchmarks/estimator_ways.py [--out FOLDER]`.

Times one evaluation of the five-fold criterion with its hypergradient, by every way that the estimators choose from and
by two of the engine's methods on the same problem, and says which one the estimator takes. Writes WAYS.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from threadpoolctl import threadpool_limits

import bilevel as bl
from bilevel.estimators import BilevelLogisticRegression, BilevelRidge
from bilevel.estimators.criterion import Criterion
from bilevel.estimators.folds import Folds, split
from bilevel.estimators.gram_criterion import GramCriterion
from bilevel.estimators.linear_problem import LinearProblem
from bilevel.estimators.losses import LogLoss, SquaredError
from bilevel.estimators.newton_criterion import NewtonCriterion
from bilevel.estimators.ridge_criterion import KernelEquations, NormalEquations

SIZES = [(100, 20), (100, 400), (1_000, 100), (5_000, 300), (300, 2_000), (20_000, 1_000)]
ROUNDS = 5
Ways = dict[str, Callable[[np.ndarray], object]]


def newton(X: np.ndarray, y: np.ndarray, folds: Folds, loss: object, dense: bool) -> Criterion:
    criterion = NewtonCriterion(LinearProblem(X, y, folds, loss, free=True))
    criterion.dense = dense
    return criterion


def engine(criterion: Criterion, method: bl.Method, steps: int) -> Callable[[np.ndarray], object]:
    """A method of the engine on the normal equations, all folds in one problem."""

    def evaluate(log_alpha: np.ndarray) -> object:
        problem, lam, task, _, _ = criterion.bilevel_problem(log_alpha)
        curvature = float(torch.linalg.eigvalsh(task.train[0]).max()) + float(lam.exp().max())
        dynamics = bl.GradientDescent(1 / curvature)
        return bl.hypergradient(problem, lam, task, dynamics=dynamics, steps=steps, method=method)

    return evaluate


def ridge(X: np.ndarray, y: np.ndarray) -> Iterator[tuple[str, Callable[[np.ndarray], object]]]:
    folds = split(5, X, y[:, 0], np.ones(len(y)), classes=False, random_state=0)
    rows, features = X.shape
    if features <= 2_000:
        normal = NormalEquations.of(X, y, folds, True, shared=False)
        yield "normal equations, Cholesky", normal.evaluate
    if features <= 100:
        yield "engine: Implicit(CG()) after 2,000 steps", engine(normal, bl.Implicit(bl.CG(1e-8)), 2_000)
        yield "engine: Spectral(), T = 100,000", engine(normal, bl.Spectral(), 100_000)
    if rows <= 5_000:
        yield "kernel equations, Cholesky", KernelEquations(X, y, folds, True).evaluate
    yield "conjugate gradients", newton(X, y, folds, SquaredError(), dense=False).evaluate


def logistic(X: np.ndarray, y: np.ndarray) -> Iterator[tuple[str, Callable[[np.ndarray], object]]]:
    folds = split(5, X, y[:, 0], np.ones(len(y)), classes=True, random_state=0)
    if X.shape[1] <= 1_000:
        yield "Newton, Cholesky", newton(X, y, folds, LogLoss(), dense=True).evaluate
    yield "Newton, conjugate gradients", newton(X, y, folds, LogLoss(), dense=False).evaluate
    if X.shape[1] <= 1_000:
        yield "stale Hessians, swept", GramCriterion(LinearProblem(X, y, folds, LogLoss(), free=True)).evaluate


def seconds(evaluate: Callable[[np.ndarray], object], features: int) -> float:
    """The median of evaluations at neighbouring points, as in a descent."""
    rng = np.random.default_rng(1)
    log_alpha, taken = np.full(features, 3.0), []
    for _ in range(ROUNDS + 1):
        began = time.process_time()
        evaluate(log_alpha)
        taken.append(time.process_time() - began)
        log_alpha = log_alpha + 0.2 * rng.normal(size=features)
    return float(np.median(taken[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "# Ways to the criterion of an estimator",
        "",
        "Milliseconds of processor time, one thread, for one evaluation of the five-fold criterion with its",
        "hypergradient for a penalty per feature: medians of five evaluations at neighbouring points. The estimator",
        "takes the way in bold.",
        "",
        "| model | rows × features | way | ms |",
        "|---|---|---|---:|",
    ]
    with threadpool_limits(1):
        for name, ways, estimator in (
            ("ridge", ridge, BilevelRidge()),
            ("logistic", logistic, BilevelLogisticRegression()),
        ):
            for rows, features in SIZES:
                rng = np.random.default_rng(0)
                X = rng.normal(size=(rows, features))
                y = X[:, :1] + rng.normal(size=(rows, 1))
                y = (y > 0).astype(float) if name == "logistic" else y
                folds = split(5, X, y[:, 0], np.ones(rows), classes=name == "logistic", random_state=0)
                taken = estimator._criterion(X, y, folds)
                chosen = (
                    ("stale" if isinstance(taken, GramCriterion) else "conj" if not taken.dense else "Newton, Cholesky")
                    if isinstance(taken, NewtonCriterion)
                    else ("normal" if isinstance(taken, NormalEquations) else "kernel")
                )
                del taken
                for way, evaluate in ways(X, y):
                    label = f"**{way}**" if chosen in way and "engine" not in way else way
                    lines.append(
                        f"| {name} | {rows:,} × {features:,} | {label} | {1e3 * seconds(evaluate, features):.1f} |"
                    )
                    print(lines[-1], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "WAYS.md").write_text("\n".join(lines) + "\n")
    print(f"Written: {options.out / 'WAYS.md'}")


if __name__ == "__main__":
    main()
