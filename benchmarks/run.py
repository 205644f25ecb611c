"""The benchmark: `python benchmarks/run.py [--quick] [--only SECTION] [--out FOLDER] [--show]`.

Times all methods of the package for the hypergradient, and other libraries, on the same problems. Measures memory and
start-up time, and compares all figures with the targets. Each other library gets its own virtual environment in
`.bench/`. A new contestant is a new file in `contestants/`, and a new section is a new file in `sections/`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from harness import contestants, report, section
from harness.contestants import WorkerError
from harness.environments import FOLDER
from harness.pool import Pool
from harness.results import Results
from harness.section import Bench, Section


def arguments(sections: dict[str, Section]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="take a few minutes: fewer rounds, smaller T; writes to .bench/quick unless --out is given",
    )
    parser.add_argument(
        "--out", type=Path, help="folder for results.json, RESULTS.md and the pictures (default: benchmarks/results)"
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=list(sections),
        help="measure this section only; the other sections keep their earlier figures",
    )
    parser.add_argument(
        "--checkout", type=Path, help="a checkout of benchmark_bilevel, for the section `referee`; it is only read"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help="for the section `referee`: start no solver after this many minutes; the next call continues",
    )
    parser.add_argument(
        "--show", action="store_true", help="measure nothing; write the tables and pictures again from stored figures"
    )
    return parser.parse_args()


def main() -> None:
    sections = section.find()
    options = arguments(sections)
    if options.checkout:
        os.environ["REFEREE_CHECKOUT"] = str(options.checkout.resolve())
    if options.minutes is not None:
        os.environ["REFEREE_MINUTES"] = str(options.minutes)
    console = Console()
    if not console.is_terminal:
        console.width = 140
    # A quick run must not overwrite the figures of a full one.
    folder = options.out or (FOLDER / "quick" if options.quick else Path(__file__).parent / "results")
    results = Results(folder)
    failures = {}
    if not options.show:
        failures = measure(results, [sections[name] for name in options.only or sections], options.quick, console)
    report.write(results, sections)
    report.show(results, sections, console)
    console.print(f"Written to {folder}: results.json, RESULTS.md and the pictures.")
    for name, reason in failures.items():
        console.print(f"\n{name} failed and keeps its earlier figures, if it has any. {reason}", markup=False)
    sys.exit(bool(failures))


def measure(results: Results, sections: list[Section], quick: bool, console: Console) -> dict[str, str]:
    """Measure the sections one after the other. Returns those that failed, with the reasons."""
    failures = {}
    pool = Pool(contestants.find(), quick)
    columns = (
        TextColumn("{task.fields[section]:>10}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    try:
        with tempfile.TemporaryDirectory() as cases, Progress(*columns, console=console) as progress:
            for chosen in sections:
                bar = progress.add_task("", section=chosen.name, total=1.0)

                def tick(what: str, amount: float, bar: TaskID = bar) -> None:
                    progress.update(bar, description=what, advance=amount)

                try:
                    results.put(chosen.name, chosen.measure(Bench(pool, quick, Path(cases), tick)), quick)
                except WorkerError as error:
                    failures[chosen.name] = str(error)
                    progress.update(bar, description="failed")
                    continue
                progress.update(bar, description="done", completed=1.0)
                results.save()
    finally:
        pool.close()
    return failures


if __name__ == "__main__":
    main()
