"""The estimators against scikit-learn's: `python benchmarks/estimators.py [--quick] [--only TEXT] [--out FOLDER]`.

On every table, all models are trained on the same standardised rows and evaluated on the same held-out rows. Compares
errors and processor times with one thread. Writes ESTIMATORS.md, estimators.json and estimators.png.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn import datasets
from sklearn.linear_model import ElasticNetCV, LogisticRegressionCV, Ridge, RidgeCV
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

from bilevel.estimators import BilevelElasticNet, BilevelLogisticRegression, BilevelRidge

ALPHAS = np.logspace(-3, 5, 31)
SMALL = 20_000  # a table with at most this many entries is split ten times


@dataclass(frozen=True)
class Table:
    """Data with a name. `draw(seed)` returns X and y for training, then X and y for testing."""

    name: str
    draw: Callable[[int], tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]
    size: int
    classes: bool = False

    @property
    def splits(self) -> int:
        return 10 if self.size <= SMALL else 3 if self.size <= 3_000_000 else 1


def bundled(name: str, load: Callable[..., object], noise: int = 0, classes: bool = False) -> Table:
    X, y = load(return_X_y=True)

    def draw(seed: int) -> tuple[np.ndarray, ...]:
        wide = np.hstack([X, X.std() * np.random.default_rng(seed).normal(size=(len(X), noise))])
        X_train, X_test, y_train, y_test = train_test_split(
            wide, y, test_size=0.25, random_state=seed, stratify=y if classes else None
        )
        return X_train, y_train, X_test, y_test

    title = f"{name}, {len(X)} × {X.shape[1]}" + (f" + {noise} of noise" if noise else "")
    return Table(title, draw, len(X) * (X.shape[1] + noise), classes)


def generated(rows: int, features: int, informative: int, classes: bool = False, noise: float = 1.0) -> Table:
    def draw(seed: int) -> tuple[np.ndarray, ...]:
        rng = np.random.default_rng(seed)
        X = rng.normal(size=(rows + 5000, features))
        signal = X[:, :informative] @ rng.normal(size=informative)
        y = signal + noise * signal.std() * rng.normal(size=len(X))
        if classes:
            y = (y > 0).astype(int)
        return X[:rows], y[:rows], X[rows:], y[rows:]

    title = f"generated, {rows:,} × {features:,}, {informative} informative"
    return Table(title, draw, rows * features, classes)


REGRESSION = [
    bundled("diabetes", datasets.load_diabetes),
    bundled("diabetes", datasets.load_diabetes, noise=50),
    generated(100, 200, 5, noise=0.5),
    generated(200, 100, 10),
    generated(200, 50, 50),
    generated(100, 200, 200, noise=0.5),
    generated(2_000, 200, 20, noise=3),
    generated(10_000, 300, 30, noise=5),
    generated(100_000, 1_000, 100, noise=10),
]
CLASSIFICATION = [
    bundled("iris", datasets.load_iris, classes=True),
    bundled("wine", datasets.load_wine, classes=True),
    bundled("breast cancer", datasets.load_breast_cancer, classes=True),
    bundled("breast cancer", datasets.load_breast_cancer, noise=100, classes=True),
    generated(200, 100, 5, classes=True, noise=0.3),
    generated(200, 30, 30, classes=True, noise=0.3),
    generated(2_000, 200, 20, classes=True),
    generated(10_000, 300, 30, classes=True, noise=2),
]

# The models that are compared, by family. The rival is first.
FAMILIES: dict[str, tuple[list[Table], dict[str, Callable[[], object]]]] = {
    "ridge": (
        REGRESSION,
        {
            "RidgeCV": lambda: RidgeCV(ALPHAS),
            "GridSearchCV(Ridge)": lambda: GridSearchCV(Ridge(), {"alpha": ALPHAS}, cv=5),
            "BilevelRidge('shared')": lambda: BilevelRidge("shared"),
            "BilevelRidge()": BilevelRidge,
        },
    ),
    "elastic net": (
        REGRESSION[:7],
        {
            "ElasticNetCV": ElasticNetCV,
            "BilevelElasticNet('shared')": lambda: BilevelElasticNet("shared"),
            "BilevelElasticNet()": BilevelElasticNet,
        },
    ),
    "logistic": (
        CLASSIFICATION,
        {
            "LogisticRegressionCV": lambda: LogisticRegressionCV(Cs=10, cv=5, max_iter=1000, scoring="neg_log_loss"),
            "BilevelLogisticRegression('shared')": lambda: BilevelLogisticRegression("shared"),
            "BilevelLogisticRegression()": BilevelLogisticRegression,
        },
    ),
}
RIVAL = {"ridge": "RidgeCV", "elastic net": "ElasticNetCV", "logistic": "LogisticRegressionCV"}


def measure(table: Table, build: Callable[[], object], seed: int) -> tuple[float, float]:
    """The error on the held-out rows (1 − R², or the log loss) and the processor time of the fit in seconds."""
    X, y, X_test, y_test = table.draw(seed)
    scaler = StandardScaler().fit(X)
    X, X_test = scaler.transform(X), scaler.transform(X_test)
    model = build()
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecation warnings of scikit-learn
        began = time.process_time()
        model.fit(X, y)
        seconds = time.process_time() - began
    if table.classes:
        return float(log_loss(y_test, model.predict_proba(X_test))), seconds
    return float(1 - model.score(X_test, y_test)), seconds


def cases(quick: bool, only: str | None) -> Iterator[tuple[str, Table, str, Callable[[], object], int]]:
    for family, (tables, models) in FAMILIES.items():
        for table in tables:
            if (quick and table.size > SMALL) or (only and only not in f"{family}: {table.name}"):
                continue
            for seed in range(2 if quick else table.splits):
                for label, build in models.items():
                    if "GridSearch" in label and table.splits == 1:
                        continue  # 155 fits of the largest table would take longer than everything else
                    yield family, table, label, build, seed


def summary(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """One entry for each table and model: mean error, its paired difference from the rival's, median seconds."""
    found = []
    for family, rival in RIVAL.items():
        ours = [row for row in rows if row["family"] == family]
        for table in dict.fromkeys(row["table"] for row in ours):
            by_model: dict[str, list[dict[str, object]]] = {}
            for row in ours:
                if row["table"] == table:
                    by_model.setdefault(row["model"], []).append(row)
            base = np.array([row["error"] for row in by_model[rival]])
            for model, entries in by_model.items():
                errors = np.array([row["error"] for row in entries])
                difference = errors - base
                spread = difference.std(ddof=1) / np.sqrt(len(errors)) if len(errors) > 1 else None
                found.append(
                    {
                        "family": family,
                        "table": table,
                        "model": model,
                        "splits": len(errors),
                        "error": errors.mean(),
                        "difference": difference.mean(),
                        "standard_error": spread,
                        "seconds": float(np.median([row["seconds"] for row in entries])),
                    }
                )
    return found


def markdown(entries: list[dict[str, object]]) -> str:
    lines = [
        "# The estimators against scikit-learn's",
        "",
        "The error on held-out rows is 1 − R² for ridge and elastic net, and the log loss for logistic regression. It",
        "is a mean over the splits. The column *against* is the model's error minus the rival's on the same splits, ±",
        "one standard error. It is bold if our error is lower by more than two standard errors, and italic if it is",
        "higher by more than two. Seconds are processor time with one thread, medians over the splits. All features",
        "are standardised on the training rows.",
        "",
        "![Error and time of one penalty per feature over those of scikit-learn's estimator](estimators.png)",
    ]
    for family, rival in RIVAL.items():
        chosen = [entry for entry in entries if entry["family"] == family]
        if not chosen:
            continue
        lines += [
            "",
            f"## {family.capitalize()}",
            "",
            f"| table | splits | model | error | against {rival} | seconds |",
        ]
        lines.append("|---|---:|---|---:|---:|---:|")
        for entry in chosen:
            spread = entry["standard_error"]
            difference = "" if entry["model"] == rival else f"{entry['difference']:+.4f}"
            if difference and spread is not None:
                difference += f" ± {spread:.4f}"
                if abs(entry["difference"]) > 2 * spread and "Bilevel" in entry["model"]:
                    mark = "**" if entry["difference"] < 0 else "*"
                    difference = f"{mark}{difference}{mark}"
            lines.append(
                f"| {entry['table']} | {entry['splits']} | `{entry['model']}` | {entry['error']:.4f} | {difference} | "
                f"{entry['seconds']:.2f} |"
            )
    return "\n".join(lines) + "\n"


def picture(entries: list[dict[str, object]], path: Path) -> None:
    """The error and time of one penalty per feature relative to scikit-learn's estimator, one line per table."""
    own = {"ridge": "BilevelRidge()", "elastic net": "BilevelElasticNet()", "logistic": "BilevelLogisticRegression()"}
    known = {(e["family"], e["table"], e["model"]): e for e in entries}
    rows = [(f, t) for f, t, m in known if m == own[f]]
    figure = Figure(figsize=(9, 0.32 * len(rows) + 1.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    colours = {"ridge": "#3366aa", "elastic net": "#228866", "logistic": "#bb5533"}
    for axes, key, title in ((left, "error", "error"), (right, "seconds", "time")):
        for place, (family, table) in enumerate(reversed(rows)):
            ratio = known[family, table, own[family]][key] / known[family, table, RIVAL[family]][key]
            axes.plot(ratio, place, "o", color=colours[family])
            axes.plot([1, ratio], [place, place], color=colours[family], linewidth=1)
        axes.axvline(1, color="#888888", linewidth=1)
        axes.set_xscale("log" if key == "seconds" else "linear")
        axes.set_title(f"{title}, one penalty per feature / scikit-learn's CV", fontsize=9)
    left.set_yticks(range(len(rows)), [f"{family}: {table}" for family, table in reversed(rows)], fontsize=7)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two splits of the small tables; writes to .bench/quick")
    parser.add_argument(
        "--only", metavar="TEXT", help="measure only tables whose 'family: name' contains this; other results are kept"
    )
    parser.add_argument("--out", type=Path, help="folder for the results (default: benchmarks/results)")
    options = parser.parse_args()
    here = Path(__file__).parent
    folder = options.out or (here.parent / ".bench" / "quick" if options.quick else here / "results")
    folder.mkdir(parents=True, exist_ok=True)
    work = list(cases(options.quick, options.only))
    record = folder / "estimators.json"
    done = {(family, table.name) for family, table, *_ in work}
    rows = json.loads(record.read_text()) if record.exists() else []
    rows = [row for row in rows if (row["family"], row["table"]) not in done]
    columns = (TextColumn("{task.description:60}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress:
        bar = progress.add_task("", total=len(work))
        for family, table, label, build, seed in work:
            progress.update(bar, description=f"{label} on {table.name}"[:60])
            error, seconds = measure(table, build, seed)
            rows.append(
                {
                    "family": family,
                    "table": table.name,
                    "model": label,
                    "seed": seed,
                    "error": error,
                    "seconds": seconds,
                }
            )
            record.write_text(json.dumps(rows, indent=1) + "\n")
            progress.advance(bar)
    order = [(family, table.name) for family, (tables, _) in FAMILIES.items() for table in tables]
    rows.sort(key=lambda row: order.index((row["family"], row["table"])))
    entries = summary(rows)
    (folder / "ESTIMATORS.md").write_text(markdown(entries))
    picture(entries, folder / "estimators.png")
    print(markdown(entries))
    print(f"Written: {folder / 'ESTIMATORS.md'}, {record.name}, estimators.png")


if __name__ == "__main__":
    main()
