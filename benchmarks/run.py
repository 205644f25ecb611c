"""The benchmark: `python benchmarks/run.py [--quick] [--out FOLDER] [--only SECTION]`.

Times every way to the hypergradient that the package has, and its peers, on the same problems; measures memory; holds
both against the targets. Each peer gets a virtual environment of its own in `.bench/`. A new contestant is a new file
in `contestants/`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from harness import contestants
from harness.environments import FOLDER
from harness.pictures import draw
from harness.report import show, write_markdown
from harness.results import Results
from harness.sections import FULL, QUICK, SECTIONS, Pool


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="about a minute: fewer rounds, smaller T; writes to .bench/quick unless --out says otherwise",
    )
    parser.add_argument(
        "--out", type=Path, help="folder for results.json, RESULTS.md and the pictures (default: benchmarks/results)"
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=list(SECTIONS),
        help="measure this section only; the others keep their earlier figures",
    )
    return parser.parse_args()


def main() -> None:
    options = arguments()
    console = Console()
    if not console.is_terminal:
        console.width = 140
    # A quick run must not overwrite the figures of a full one.
    folder = options.out or (FOLDER / "quick" if options.quick else Path(__file__).parent / "results")
    results = Results(folder)
    pool = Pool(contestants.find(), options.quick)
    columns = (
        TextColumn("{task.fields[section]:>8}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    try:
        with tempfile.TemporaryDirectory() as cases, Progress(*columns, console=console) as progress:
            for name in options.only or SECTIONS:
                bar = progress.add_task("", section=name, total=1.0)

                def tick(what: str, amount: float, bar: TaskID = bar) -> None:
                    progress.update(bar, description=what, advance=amount)

                results.put(
                    name, SECTIONS[name](pool, QUICK if options.quick else FULL, Path(cases), tick), options.quick
                )
                progress.update(bar, description="done", completed=1.0)
                results.save()
    finally:
        pool.close()
    draw(results)
    write_markdown(results)
    show(results, console)
    console.print(f"Written to {folder}: results.json, RESULTS.md and the pictures.")


if __name__ == "__main__":
    main()
