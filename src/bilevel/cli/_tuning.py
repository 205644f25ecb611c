"""What `bilevel tune` does; apart, because it needs torch."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from bilevel.errors import BilevelError
from bilevel.experiments.records import machine, plain, staging

if TYPE_CHECKING:
    from bilevel.tabular.study import Study

FILES = {
    "model": "model.safetensors",
    "features": "table.csv",
    "numbers": "result.json",
    "page": "page.html",
    "picture": "picture.png",
}
LARGEST = 10


def run(
    data: Path,
    settings: dict[str, Any],
    folder: Path,
    *,
    reading: dict[str, Any],
    force: bool,
    threads: int | None,
    quiet: bool,
    command: str,
) -> dict[str, Any]:
    """Tune, and write everything to the folder; what was found, as plain data."""
    from bilevel.tabular.reading import read_table
    from bilevel.tabular.settings import TuneSettings
    from bilevel.tabular.study import tune

    asked = TuneSettings(**settings)
    check_folder(data, folder, force)
    began = time.perf_counter()
    watched = not quiet and sys.stderr.isatty()

    def doing(what: str) -> None:
        if watched:
            typer.echo(f"{what} …", err=True)

    with staging(folder.parent, folder.name) as (scratch, publish), limited(threads):
        doing(f"reading {data.name}")
        table = read_table(data, **reading)
        study = tune(table, asked, verbose=watched, doing=doing)
        doing("writing")
        record = write(study, scratch, command, began)
        publish()
    return record


def write(study: Study, scratch: Path, command: str, began: float) -> dict[str, Any]:
    """All files of a result."""
    from bilevel.cli._tuning_picture import draw
    from bilevel.report.table_page import render
    from bilevel.tabular.importance import features, table_csv
    from bilevel.tabular.record import record, test_points

    found = plain(
        {
            **record(study),
            "command": command,
            "minutes": (time.perf_counter() - began) / 60,
            "machine": machine(),
            "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
    )
    points = plain(test_points(study))
    study.model.save(scratch / FILES["model"])
    (scratch / FILES["features"]).write_text(table_csv(study.model, features(study)), encoding="utf-8", newline="")
    (scratch / FILES["page"]).write_text(render(found, points), encoding="utf-8", errors="replace")
    draw(found, points, scratch / FILES["picture"])
    numbers = json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    (scratch / FILES["numbers"]).write_text(numbers, encoding="utf-8", errors="replace")
    return found


def check_folder(data: Path, folder: Path, force: bool) -> None:
    """Refuse a folder whose files are in the way, before any work."""
    for name in FILES.values():
        if (folder / name).exists() and data.exists() and (folder / name).samefile(data):
            raise BilevelError(f"{data} would be written over by {folder / name}; pass another --out DIR.")
    if (folder / FILES["numbers"]).exists() and not force:
        raise BilevelError(f"{folder} holds a finished result. Write --force to replace it, or another --out DIR.")


@contextlib.contextmanager
def limited(threads: int | None) -> Iterator[None]:
    """Let torch and the linear algebra below numpy use so many threads."""
    if threads is None:
        yield
        return
    import torch
    from threadpoolctl import threadpool_limits

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with threadpool_limits(threads):
            yield
    finally:
        torch.set_num_threads(before)


def show(record: dict[str, Any], folder: Path) -> None:
    """The result for people: errors side by side, the largest coefficients, what is switched off, and the files."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # A pipe has no width of its own.
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    for line in heading(record):
        typer.echo(line)
    share, error = ("accuracy", "log_loss") if record["classes"] else ("r2", "rmse")
    words = ("accuracy", "log loss") if record["classes"] else ("R²", "RMSE")
    table = Table(title=Text("Test errors"), box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("")
    for name in (*words, "seconds"):
        table.add_column(name, justify="right")
    for one in record["comparison"]:
        seconds = f"{one['seconds']:.2f}" if one["seconds"] else ""
        # R² has no meaning where all test rows have one value.
        fixed = f"{one[share]:.4f}" if isinstance(one[share], float) else "–"
        table.add_row(Text(one["name"]), fixed, number(one[error]), seconds)
    console.print(table)
    typer.echo(record["verdict"] + "\n")
    console.print(largest(record))
    for line in [switched_off(record), "", record["method"], record["outcome"], *record["notes"], ""]:
        typer.echo(line)
    for label, file in FILES.items():
        typer.echo(f"{label + ':':10}{folder / file}")
    typer.echo(f"{'predict:':10}bilevel predict {folder} NEW.csv")


def heading(record: dict[str, Any]) -> list[str]:
    data, count = record["data"], len(record["features"])
    because = f" (chosen because {record['model_chosen_because']})" if record["model_chosen_because"] else ""
    return [
        f"{record['target']!r} of {data['file']} by {record['model']}{because}, penalty {record['penalty']}: "
        f"{count} feature{'s' * (count != 1)}, {data['training_rows']:,} training and {data['test_rows']:,} test rows."
    ]


def largest(record: dict[str, Any]) -> Any:
    """The features with the largest coefficients."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    def size(one: dict[str, Any]) -> float:
        return sum(value**2 for value in one["coefficients"]) ** 0.5

    top = sorted(record["features"], key=size, reverse=True)[:LARGEST]
    several = len(record["classes"]) > 2
    table = Table(
        title=Text(
            f"The {'largest of ' if len(record['features']) > len(top) else ''}{len(record['features'])} features"
        ),
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    table.add_column("", overflow="fold")
    kinds = ["length of coefficients"] if several else ["coefficient per deviation", "per unit"]
    for name in (*kinds, "penalty α", "shrinkage"):
        table.add_column(name, justify="right")
    for one in top:
        values = [size(one)] if several else [one["coefficients"][0], one["coefficients_raw"][0]]
        shrunk = f"{one['shrinkage']:.1%}" + (" off" if one["off"] else "")
        table.add_row(Text(one["name"]), *map(number, values), number(one["penalty"]), shrunk)
    return table


def switched_off(record: dict[str, Any]) -> str:
    """How many features do nothing, and which."""
    off, count = record["switched_off"], len(record["features"])
    mostly = sum(one["shrinkage"] > 0.5 for one in record["features"])
    effective = (
        f"{mostly or 'None'} {'is' if mostly == 1 else 'are'} held more by the penalty than by the data; the model has "
        f"the freedom of {record['effective_features']:.1f} features without one."
    )
    if not off:
        return f"None of {count} features is switched off (held to 95 % by its penalty). {effective}"
    names = ", ".join(off[:LARGEST]) + (f" and {len(off) - LARGEST} more" if len(off) > LARGEST else "")
    return f"{len(off)} of {count} features switched off, by their penalty or at exactly 0: {names}. {effective}"


def number(value: Any) -> str:
    """
    >>> number(56.4), number(5000.0), number("nan")
    ('56.40', '5000', '–')
    """
    return f"{value:#.4g}".removesuffix(".") if isinstance(value, (int, float)) else "–"
