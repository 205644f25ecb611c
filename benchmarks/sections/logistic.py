"""Large logistic regression with one penalty per feature.

As a program: `python -m sections.logistic METHOD ROWS FEATURES CORRELATION LAM_FILE BEST_LOSS`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from harness import probe

if TYPE_CHECKING:
    from harness.figures import Figures
    from harness.section import Bench
    from harness.tables import Table
    from harness.targets import Target

ORDER = 40
TITLE = "Large logistic regression"
WHAT = """
The data: neighbouring features are correlated (0.9), a tenth of the features matter, and the labels are noisy. The last
fifth of the rows is held out. All numbers are float64. The grid: `LogisticRegressionCV` tries 20 values of one penalty,
once with its default tolerance, and once with a tolerance at which every fit converges. The bilevel methods tune one
penalty for each feature by the hypergradient of the same hold-out loss. They start from the strongest penalty of the
grid. `Implicit(CG(tol), newton=tol, preconditioner=f)` starts both of its solvers from their previous solutions. Its
tolerances fall by a constant factor from one hyperiteration to the next, until the hypergradient is within 0.001 of a
tightly solved one. The preconditioner f is a Cholesky factor of the Hessian on a tenth of the rows. Its Gram matrix is
computed once, and the time includes it. `Unrolled` records the number of heavy-ball steps that the same accuracy needs,
with the optimal step size and momentum for the curvature. The fit of the estimator does more: it first searches for one
common penalty, and afterwards computes the certificate and fits all rows. The settings were chosen with another seed.
The second table has features without correlation, which is the easy case for a grid.
"""

ITERATIONS = 10
ACCURACY = 1e-3
CORRELATION = 0.9
# An estimate of the smallest eigenvalue of the Hessian of the loss, without the penalties: that of the features'
# correlation matrix, times 0.25, the largest second derivative of the log loss, times 0.8.
MU = 0.8 * 0.25 * (1 - CORRELATION) / (1 + CORRELATION)
# The numbers of steps that are tried for `Unrolled`.
STEPS_TRIED = (220, 270, 330, 400)
# The share of the rows that the preconditioner uses.
SHARE = 0.1
CASES = {
    "correlated": (CORRELATION, ("grid", "tight grid", "implicit", "unrolled", "estimator")),
    "independent": (0.0, ("grid", "implicit")),
}


@dataclass(frozen=True)
class Tuning:
    """The time and the result of one method that tunes penalties.

    Attributes:
        penalties: how many penalties were tuned.
        seconds: processor time, from the data to the penalties.
        value: the hold-out loss at the tuned penalties.
        reached: seconds until the hold-out loss was no worse than the grid's best.
        error: the relative error of the last hypergradient, compared with a tightly solved one.
    """

    label: str
    penalties: int
    seconds: float
    value: float
    reached: float | None = None
    error: float | None = None


def measure(bench: Bench) -> dict[str, Any]:
    rows, features = bench.pick(quick=(10_000, 100), full=(100_000, 1_000))
    lam = bench.folder / "logistic_lam.npy"
    found: dict[str, list[dict[str, Any]]] = {}
    cases = bench.pick(quick=["correlated"], full=list(CASES))
    for case in cases:
        correlation, methods = CASES[case]
        found[case], best = [], float("inf")
        for who in methods:
            answer = probe.ask("logistic", who, rows, features, str(correlation), str(lam), str(best))
            best = min(best, answer["value"]) if "grid" in who else best
            found[case].append(answer)
            bench.tick(f"{case}, {who}", 1 / sum(len(CASES[case][1]) for case in cases))
    return {"rows": rows, "features": features, "cases": cases, **found}


def targets(figures: Figures) -> Iterator[Target]:
    from harness.targets import Target

    grid, tight, implicit, unrolled, _ = figures.rows(Tuning, "correlated")
    assert implicit.reached is not None and implicit.error is not None
    times = unrolled.seconds / implicit.seconds
    words = f"{times:.1f}: {implicit.seconds:.1f} and {unrolled.seconds:.1f} s"
    yield Target("Implicit at least 5 times faster than Unrolled", "logistic", times, 5.0, words, at_least=True)
    for rival, name in ((grid, "LogisticRegressionCV"), (tight, "a converged LogisticRegressionCV")):
        times = rival.seconds / implicit.reached
        words = f"{times:.1f}: {implicit.reached:.1f} and {rival.seconds:.1f} s"
        claim = f"Implicit reaches the hold-out loss of {name} at least 5 times faster"
        yield Target(claim, "logistic", times, 5.0, words, at_least=True)
    times = grid.seconds / implicit.seconds
    words = f"{times:.1f}: {implicit.seconds:.1f} and {grid.seconds:.1f} s"
    note = (
        "The grid tunes one penalty. The hyperiterations tune a thousand and end at a lower loss. Nearly all of the "
        "time is spent in products with X, which the memory bandwidth of this machine limits. Each hyperiteration "
        "needs a dozen products or more."
    )
    claim = "all hyperiterations of Implicit, to an error of 0.001, at least 5 times faster than LogisticRegressionCV"
    yield Target(claim, "logistic", times, 5.0, words, at_least=True, limit_note=note)
    words = f"{implicit.error:.1e}"
    claim = "the last hypergradient of Implicit has an error of at most 0.001"
    yield Target(claim, "logistic", implicit.error, ACCURACY, words)


def tables(figures: Figures) -> Iterator[Table]:
    from harness.tables import Table

    columns = ["method", "penalties", "seconds", "hold-out loss", "seconds to the grid's loss"]
    columns += ["error of the hypergradient"]
    note = (
        f"Processor time, one thread, each method in a fresh process. {ITERATIONS} hyperiterations of Adam. For "
        f"`Unrolled` one hyperiteration was timed, at the last λ, and multiplied by {ITERATIONS}, because all take the "
        "same time. The hold-out loss is the minimised objective, so more penalties make it lower. It does not "
        "estimate the loss on new rows."
    )
    for case in figures["cases"]:
        more = note if case == "correlated" else "The settings are those of the correlated features."
        rows = [
            [
                row.label,
                f"{row.penalties:,}",
                f"{row.seconds:.1f}",
                f"{row.value:.5f}",
                "" if row.reached is None else f"{row.reached:.1f}",
                "" if row.error is None else f"{row.error:.1e}",
            ]
            for row in figures.rows(Tuning, case)
        ]
        yield Table(f"{figures['rows']:,} × {figures['features']:,}, {case} features", columns, rows, more)


def data(rows: int, features: int, correlation: float = CORRELATION, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, features))
    for j in range(1, features):
        X[:, j] = correlation * X[:, j - 1] + np.sqrt(1 - correlation**2) * X[:, j]
    true = np.zeros(features)
    true[rng.choice(features, features // 10, replace=False)] = rng.normal(size=features // 10)
    signal = X @ true
    return X, (signal + 2 * signal.std() * rng.normal(size=rows) > 0).astype(float)


def holdout(rows: int) -> Any:
    from sklearn.model_selection import PredefinedSplit

    return PredefinedSplit(np.where(np.arange(rows) < rows * 4 // 5, -1, 0))


def grid(X: np.ndarray, y: np.ndarray, tol: float, label: str) -> Tuning:
    from sklearn.linear_model import LogisticRegressionCV

    began = time.process_time()
    model = LogisticRegressionCV(Cs=20, cv=holdout(len(y)), scoring="neg_log_loss", tol=tol, max_iter=1000)
    model.fit(X, y)
    return Tuning(label, 1, time.process_time() - began, -float(model.scores_[1.0].mean(0).max()))


def estimator(X: np.ndarray, y: np.ndarray) -> Tuning:
    from bilevel.estimators import BilevelLogisticRegression

    began = time.process_time()
    # The hold-out set has 20 rows per penalty. The tether is the one that the estimator uses with so many rows.
    model = BilevelLogisticRegression(cv=holdout(len(y)), tether=1.0, tol=1e-3).fit(X, y)
    taken = time.process_time() - began
    return Tuning(
        "`BilevelLogisticRegression(tol=1e-3)`, all of the fit", X.shape[1], taken, float(model.history_["value"][-1])
    )


def problem_of(X: np.ndarray, y: np.ndarray) -> tuple[Any, Any, Any]:
    """The problem, the initial λ and the task. X is not copied."""
    import torch
    from torch.nn.functional import binary_cross_entropy_with_logits

    import bilevel as bl

    rows, features = len(y) * 4 // 5, X.shape[1]
    table, labels = torch.from_numpy(X), torch.from_numpy(y)

    def fit(w: Any, data: Any) -> Any:
        return binary_cross_entropy_with_logits(torch.mv(data[0], w), data[1])

    problem = bl.Problem(
        lambda w, lam, data: fit(w, data) + 0.5 * (lam.exp() * w**2).sum(),
        lambda w, lam, data: fit(w, data),
        lambda lam: torch.zeros(features, dtype=torch.float64),
    )
    # The strongest penalty that scikit-learn tries, C = 1e-4, converted to an objective that is a mean over rows.
    lam = torch.full((features,), 1 / (1e-4 * rows), dtype=torch.float64).log()
    return problem, lam, bl.Task((table[:rows], labels[:rows]), (table[rows:], labels[rows:]))


def subsampled_preconditioner(train: Any) -> Callable[[Any, Any, Any], Callable[[Any], Any]]:
    """A Cholesky factor of 0.25·XᵀX/m + diag(e^λ), with m of the rows: an upper bound of their Hessian."""
    import torch

    some = train[0][: round(SHARE * len(train[0]))]
    gram = 0.25 * some.T @ some / len(some)

    def at(w: Any, lam: Any, task: Any) -> Callable[[Any], Any]:
        factor = torch.linalg.cholesky(gram + lam.exp().diag())
        return lambda v: torch.cholesky_solve(v[:, None], factor)[:, 0]

    return at


def relative(found: Any, exact: Any) -> float:
    return float((found - exact).norm() / exact.norm())


def implicit(X: np.ndarray, y: np.ndarray, best: float, path: str) -> Tuning:
    import torch

    import bilevel as bl

    problem, lam, task = problem_of(X, y)
    settings: dict[str, Any] = {"dynamics": bl.GradientDescent(0.1), "steps": 1}
    seen: list[tuple[float, bl.outer_loop.Iteration]] = []
    began = time.process_time()
    factor = subsampled_preconditioner(task.train)
    bl.solve(
        problem,
        lam,
        task,
        method=lambda k: bl.Implicit(bl.CG(tol=0.3 * 0.45**k), newton=0.03 * 0.35**k, preconditioner=factor),
        start="warm",
        constraint=bl.Box(-12, 2),
        iterations=ITERATIONS,
        optimizer=lambda params: torch.optim.Adam(params, lr=1.0, betas=(0.5, 0.9)),
        callbacks=[lambda it: seen.append((time.process_time() - began, it)) or it.k == ITERATIONS - 1],
        **settings,
    )
    taken, last = seen[-1]
    reached = next((seconds for seconds, it in seen if float(it.hypergradient.value) <= best), None)
    tight = bl.Implicit(bl.CG(tol=1e-9), newton=1e-10, preconditioner=factor)
    exact = bl.hypergradient(problem, last.lam, task, method=tight, start=last.hypergradient.inner, **settings)
    np.save(path, np.stack([last.lam.numpy(), exact.grad.numpy(), exact.inner.numpy()]))
    error = relative(last.hypergradient.grad, exact.grad)
    return Tuning(
        "`Implicit`, warm, preconditioned, tolerances fall",
        len(lam),
        taken,
        float(last.hypergradient.value),
        reached,
        error,
    )


def unrolled(X: np.ndarray, y: np.ndarray, path: str) -> Tuning:
    import torch

    import bilevel as bl

    problem, _, task = problem_of(X, y)
    lam, exact, inner = (torch.from_numpy(part) for part in np.load(path))
    found = bl.certify(problem, lam, task, dynamics=bl.GradientDescent(0.1), steps=1, start=inner, mu=MU, products=15)
    slow, fast = MU**0.5, found.nu**0.5
    heavy = bl.HeavyBall(lr=(2 / (fast + slow)) ** 2, momentum=((fast - slow) / (fast + slow)) ** 2)
    for steps in STEPS_TRIED:
        began = time.process_time()
        hg = bl.hypergradient(problem, lam, task, dynamics=heavy, steps=steps, method=bl.Unrolled())
        taken, error = time.process_time() - began, relative(hg.grad, exact)
        if error <= ACCURACY:
            break
    return Tuning(f"`Unrolled`, T = {steps}", len(lam), ITERATIONS * taken, float(hg.value), error=error)


def main() -> None:
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # deprecation warnings of scikit-learn
    who, rows, features, path = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[5]
    correlation, best = float(sys.argv[4]), float(sys.argv[6])
    warm_up(who)
    print(json.dumps(asdict(tune(who, *data(rows, features, correlation), best, path))))


def tune(who: str, X: np.ndarray, y: np.ndarray, best: float, path: str) -> Tuning:
    methods: dict[str, Callable[[], Tuning]] = {
        "grid": lambda: grid(X, y, 1e-4, "`LogisticRegressionCV`, 20 values"),
        "tight grid": lambda: grid(X, y, 1e-6, "the same, tol = 1e-6"),
        "implicit": lambda: implicit(X, y, best, path),
        "unrolled": lambda: unrolled(X, y, path),
        "estimator": lambda: estimator(X, y),
    }
    return methods[who]()


def warm_up(who: str) -> None:
    """Run on a small table first, because torch and scikit-learn import more modules at the first call."""
    with tempfile.TemporaryDirectory() as folder:
        for each in ("implicit", "unrolled") if who == "unrolled" else (who,):
            tune(each, *data(100, 10), 0.0, f"{folder}/lam.npy")


if __name__ == "__main__":
    main()
