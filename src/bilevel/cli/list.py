"""`bilevel list`: what there is to run, and what the rooms of the library hold."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, get_type_hints

import typer

from bilevel import experiments
from bilevel.cli._output import printable
from bilevel.errors import BilevelError
from bilevel.experiments.overrides import as_text, describe

ROOMS = {
    "dynamics": "bilevel.dynamics",
    "methods": "bilevel.methods",
    "solvers": "bilevel.linear_solvers",
    "constraints": "bilevel.constraints",
    "algorithms": "bilevel.algorithms",
    "learners": "bilevel.learners",
}


def command(
    what: Annotated[
        str, typer.Argument(help=f"experiments, {', '.join(ROOMS)}, or the name of an experiment for its settings.")
    ] = "experiments",
) -> None:
    """List what there is to run.

    The experiments and where they stand in the paper; or, when asked, what a room of the library holds.
    """
    if what == "experiments":
        columns([(found.name, found.paper, found.summary) for found in experiments.find().values()])
    elif what in ROOMS:
        # Only here is torch imported: a room's classes are found by importing its files.
        found = importlib.import_module(ROOMS[what]).find()
        columns([(name, *_description(kind)) for name, kind in sorted(found.items())])
    elif what in experiments.find():
        _settings(what)
    else:
        known = ["experiments", *ROOMS, *experiments.find()]
        raise BilevelError(
            f"There is no list of {what!r}.{experiments.did_you_mean(what, known)} Pass one of: {', '.join(known)}."
        )


def _description(kind: type) -> tuple[str, ...]:
    """The first line of a class; of a learner, its strategy and the first line of its file, which names the paper."""
    strategy = getattr(kind, "strategy", None)
    text = inspect.getdoc(kind) if strategy is None else inspect.getmodule(kind).__doc__
    first = (text or "").partition("\n")[0]
    return (first,) if strategy is None else (strategy, first)


def _settings(name: str) -> None:
    from bilevel.experiments.base import settings_of

    module = experiments.load(name)
    kind = settings_of(module)
    hints = get_type_hints(kind)
    quick = module.QUICK
    rows = [("--set", "default", "--quick", "")]
    for field in fields(kind):
        small = as_text(quick[field.name]) if field.name in quick else ""
        rows.append((field.name, as_text(getattr(kind(), field.name)), small, describe(hints[field.name])))
    columns(rows)


def columns(rows: Sequence[Sequence[str]]) -> None:
    """Print rows with their columns aligned; plain text, because importing a table library would take longer than the
    listing."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
