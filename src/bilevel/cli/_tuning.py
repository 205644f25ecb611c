"""The work of `bilevel tune`. Kept in its own module so that `--help` does not import torch."""

from __future__ import annotations

import json
import shlex
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import typer
from threadpoolctl import threadpool_limits

from bilevel.cli._output import as_rich, console
from bilevel.cli._tuning_picture import draw
from bilevel.errors import BilevelError
from bilevel.experiments.base import TextTable
from bilevel.experiments.records import machine, plain, staging
from bilevel.progress import heartbeat
from bilevel.report.table_page import fixed, four, render
from bilevel.tabular.formatting import counted
from bilevel.tabular.reading import read_table
from bilevel.tabular.results import chart_points, effects_csv, features_csv, result_record
from bilevel.tabular.scores import measures
from bilevel.tabular.settings import TuneSettings
from bilevel.tabular.study import TableStudy, tune

FILES = {
    "model": "model.safetensors",
    "features": "table.csv",
    "numbers": "result.json",
    "page": "page.html",
    "picture": "picture.png",
}
LARGEST = 10  # how many features are listed


def run(
    data: Path,
    settings: TuneSettings,
    folder: Path,
    reading: dict[str, Any],
    *,
    force: bool,
    threads: int | None,
    quiet: bool,
) -> dict[str, Any]:
    """Tune, write all files to the folder, and return the contents of result.json."""
    for name in FILES.values():
        if (folder / name).exists() and data.exists() and (folder / name).samefile(data):
            raise BilevelError(f"{data} would be overwritten by {folder / name}; pass another --out DIR.")
    if (folder / FILES["numbers"]).exists() and not force:
        raise BilevelError(f"{folder} holds a finished result. Write --force to replace it, or another --out DIR.")
    if threads is not None:
        torch.set_num_threads(threads)
        threadpool_limits(threads)
    began = time.perf_counter()
    with staging(folder.parent, folder.name) as (scratch, publish), heartbeat(quiet) as doing:
        doing(f"reading {data.name}")
        study = tune(read_table(data, **reading), settings, doing=doing)
        doing("writing")
        record = write(study, scratch, began)
        publish()
    return record


def write(study: TableStudy, scratch: Path, began: float) -> dict[str, Any]:
    """Write all files of a result, and return the contents of result.json."""
    record = plain(
        {
            **result_record(study),
            "command": shlex.join(["bilevel", *sys.argv[1:]]),
            "minutes": (time.perf_counter() - began) / 60,
            "machine": machine(),
            "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
    )
    points = plain(chart_points(study))
    study.model.save(scratch / FILES["model"])
    draw(record, points, study.model.pipeline[-1], scratch / FILES["picture"])
    for name, text in (
        (
            "features",
            effects_csv(record["effects"])
            if "effects" in record
            else features_csv(record["features"], record["classes"]),
        ),
        ("page", render(record, points)),
        ("numbers", json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n"),
    ):
        (scratch / FILES[name]).write_text(text, encoding="utf-8", errors="replace", newline="")
    return record


def show(record: dict[str, Any], folder: Path) -> None:
    """Print the comparison, the largest coefficients, the features that are switched off, and the files."""
    out = console()
    data, additive = record["data"], "effects" in record
    reason = record["task_chosen_because"]
    because = f" ({reason})" if reason else ""
    if record["classes"]:
        because = f" (classes, because {reason})" if reason else " (classes)"
    typer.echo(
        f"{record['target']!r} of {data['file']}{because}: {data['rows_used']:,} rows, "
        f"{counted(len(record['effects' if additive else 'features']), 'term' if additive else 'feature')}."
    )
    names = measures(record["classes"])
    rows = [
        [
            one["name"] + (" (ours)" if one["ours"] else ""),
            *(four(one[key]) if key in ("rmse", "log_loss") else fixed(one[key]) for key in names),
            "best" if one["p"] is None else f"{one['p']:.2g}",
            f"{one['seconds']:.2f}",
        ]
        for one in record["comparison"]
    ]
    title = f"Errors on held-out rows, {record['folds']} folds"
    best = next(place for place, one in enumerate(record["comparison"]) if one["p"] is None)
    out.print(as_rich(TextTable(title, ["", *names.values(), "p against best", "s per fit"], rows), bold=best))
    typer.echo(record["verdict"] + "\n")
    typer.echo(f"Saved: {record['saved']}, {record['model']} with penalty {record['penalty']}, fitted to all rows.")
    out.print(as_rich(most_important(record) if additive else largest(record)))
    if record["penalty"] == "groups":
        of = "the linear score's variance" if record["classes"] else "the target's variance on held-out rows"
        typer.echo(f"Share of {of}, by group:")
        for name, share in record["variance"].items():
            typer.echo(f"  {share:6.1%}  {name}")
    off = [] if additive else [switched_off(record)]
    for line in [*off, "", record["method"], record["outcome"], *record["notes"], ""]:
        typer.echo(line)
    for label, file in FILES.items():
        typer.echo(f"{label + ':':10}{folder / file}")
    typer.echo(f"{'predict:':10}bilevel predict {folder} NEW.csv")
    typer.echo(f"{'Python:':10}bilevel.tabular.load({str(folder)!r}).pipeline")


def most_important(record: dict[str, Any]) -> TextTable:
    """The terms with the largest effects."""
    rows = [
        [one["term"], four(one["importance"]), ", ".join(f"{part} {four(a)}" for part, a in one["penalties"].items())]
        for one in record["effects"][:LARGEST]
    ]
    count = len(record["effects"])
    title = f"The {'most important of ' if count > LARGEST else ''}{counted(count, 'term')}"
    of = "log odds" if record["classes"] else record["target"]
    return TextTable(title, ["", f"importance (deviation of its effect on {of})", "penalties"], rows)


def largest(record: dict[str, Any]) -> TextTable:
    """The features with the largest coefficients."""

    def size(one: dict[str, Any]) -> float:
        return sum(value**2 for value in one["coefficients"]) ** 0.5

    several, count = len(record["classes"]) > 2, len(record["features"])
    rows = []
    for one in sorted(record["features"], key=size, reverse=True)[:LARGEST]:
        values = [size(one)] if several else [one["coefficients"][0], one["coefficients_raw"][0]]
        shrunk = f"{one['shrinkage']:.1%}" + (" off" if one["off"] else "")
        rows.append([one["name"], *map(four, [*values, one["penalty"]]), shrunk])
    columns = ["length of coefficients"] if several else ["coefficient per deviation", "per unit"]
    title = f"The {'largest of ' if count > LARGEST else ''}{count} features"
    return TextTable(title, ["", *columns, "penalty α", "shrinkage"], rows)


def switched_off(record: dict[str, Any]) -> str:
    """How many features are switched off, and which."""
    off, count = record["switched_off"], len(record["features"])
    mostly = sum(one["shrinkage"] > 0.5 for one in record["features"])
    effective = (
        f"{mostly or 'None'} {'is' if mostly == 1 else 'are'} determined more by the penalty than by the data; the "
        f"model has the freedom of {record['effective_features']:.1f} features without a penalty."
    )
    if not off:
        return f"None of {count} features is switched off (determined to 95 % by its penalty). {effective}"
    names = ", ".join(off[:LARGEST]) + (f" and {len(off) - LARGEST} more" if len(off) > LARGEST else "")
    return f"{len(off)} of {count} features switched off, by their penalty or at exactly 0: {names}. {effective}"
