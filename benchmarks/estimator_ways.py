"""The fastest method for the criterion of an estimator, by table size: `python benchmarks/estimator_ways.py`.

Times one evaluation of the five-fold cross-validation criterion with its hypergradient. It is evaluated by every method
from which the estimators choose, and by two general methods that do not use the structure of the problem. The method
that the estimator chooses is marked. Writes WAYS.md.
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
from bilevel.estimators.folds import Folds, split
from bilevel.estimators.hyperparameters import grouping
from bilevel.estimators.rows_of_table import RowsOfTable
from bilevel.estimators.search import EXACT
from bilevel.estimators.sums_of_table import SumsOfTable
from bilevel.estimators.tables import LARGEST, FoldedTable
from bilevel.structures.losses import LogLoss, SquaredError

SIZES = [(100, 20), (100, 400), (1_000, 100), (5_000, 300), (300, 2_000), (20_000, 1_000)]
ROUNDS = 5
Evaluate = Callable[[np.ndarray], object]


def engine(table: FoldedTable, folds: Folds, method: bl.Method, steps: int = 0) -> Evaluate:
    """A function that evaluates the criterion by this method, with all folds in one task.

    Each evaluation starts from the solution of the previous one.
    """
    task = table.task(folds)
    known: dict[str, object] = {"start": table.start(task), "adjoint": None}
    curvature = float(torch.linalg.eigvalsh(task.train[0]).max()) if steps else 1.0

    def evaluate(log_alpha: np.ndarray) -> object:
        dynamics = bl.GradientDescent(1 / (curvature + float(np.exp(log_alpha).max())) if steps else 1.0)
        settings = known if steps == 0 else {"start": known["start"]}
        lam = torch.from_numpy(log_alpha)
        found = bl.hypergradient(table.problem, lam, task, dynamics=dynamics, steps=steps, method=method, **settings)
        if steps == 0:
            known.update(start=found.inner, adjoint=found.adjoint)
        return found

    return evaluate


def ridge(X: np.ndarray, y: np.ndarray, folds: Folds) -> Iterator[tuple[str, bool, Evaluate]]:
    rows, features = X.shape
    every = grouping("per-feature", features)
    taken = "normal" if features <= min(rows, LARGEST) else "kernel" if rows <= LARGEST else "conjugate"
    if features <= 2_000:
        sums = SumsOfTable(X, y, folds, every, True)
        yield "NormalEquations()", taken == "normal", engine(sums, folds, bl.NormalEquations())
    if features <= 100:
        yield "Implicit(CG()), T = 2,000", False, engine(sums, folds, bl.Implicit(bl.CG(1e-8)), 2_000)
        yield "Spectral(), T = 100,000", False, engine(sums, folds, bl.Spectral(), 100_000)
    table = RowsOfTable(X, y, folds, every, True, SquaredError())
    if rows <= 5_000:
        yield "KernelEquations()", taken == "kernel", engine(table, folds, bl.KernelEquations())
    method = bl.NewtonLinear(EXACT, dense=False)
    yield "NewtonLinear(dense=False)", taken == "conjugate", engine(table, folds, method)


def logistic(X: np.ndarray, y: np.ndarray, folds: Folds) -> Iterator[tuple[str, bool, Evaluate]]:
    table = RowsOfTable(X, y, folds, grouping("per-feature", X.shape[1]), True, LogLoss())
    taken = table.method(EXACT)
    methods = [bl.NewtonLinear(EXACT, dense=False)]
    if X.shape[1] <= 1_000:
        methods += [bl.NewtonLinear(EXACT, dense=True), bl.StaleNewton(EXACT)]
    for method in methods:
        yield str(method), method == taken, engine(table, folds, method)


def seconds(evaluate: Evaluate, features: int) -> float:
    """The median time of evaluations at neighbouring points, as in an optimisation."""
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
        "# Methods for the criterion of an estimator",
        "",
        "The time of one evaluation of the five-fold cross-validation criterion with its hypergradient, for one",
        "penalty per feature. Milliseconds of processor time, one thread, medians of five evaluations at neighbouring",
        "points. The estimator uses the method in bold.",
        "",
        "| model | rows × features | method | ms |",
        "|---|---|---|---:|",
    ]
    with threadpool_limits(1):
        for name, ways in (("ridge", ridge), ("logistic", logistic)):
            for rows, features in SIZES:
                rng = np.random.default_rng(0)
                X = rng.normal(size=(rows, features))
                y = X[:, :1] + rng.normal(size=(rows, 1))
                y = (y > 0).astype(float) if name == "logistic" else y
                folds = split(5, X, y[:, 0], np.ones(rows), classes=name == "logistic", random_state=0)
                for way, taken, evaluate in ways(X, y, folds):
                    label = f"**`{way}`**" if taken else f"`{way}`"
                    lines.append(
                        f"| {name} | {rows:,} × {features:,} | {label} | {1e3 * seconds(evaluate, features):.1f} |"
                    )
                    print(lines[-1], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "WAYS.md").write_text("\n".join(lines) + "\n")
    print(f"Written: {options.out / 'WAYS.md'}")


if __name__ == "__main__":
    main()
