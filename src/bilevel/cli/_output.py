"""Printing results on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bilevel.errors import BilevelError
from bilevel.experiments.base import CHOSEN, ExperimentResult, TextTable
from bilevel.experiments.records import ExperimentRecord

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable


def console(width: int = 120) -> Console:
    """A rich console on standard output. `width` is for pipes and files, for which rich would use 80 columns."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else width, highlight=False)


def check_writable(file: Path, name: str) -> None:
    """Refuse a file that cannot be written, before any work. `name` is its name in the message."""
    if file.is_dir() or not file.absolute().parent.is_dir():
        why = "it is a folder" if file.is_dir() else f"there is no folder {file.parent}"
        raise BilevelError(f"{name} cannot be written: {why}. Pass another file.")


def show(result: ExperimentResult, record: ExperimentRecord) -> None:
    """Print the tables, the notes and choices, and the files that were written."""
    out = console()
    for table in result.tables:
        out.print(as_rich(table))
    for note in result.notes:
        out.print(note, markup=False)
    if result.choices:
        out.print(f"\n{CHOSEN}:")
    for name, text in result.choices.items():
        out.print(f"  {name}: {text}", markup=False)
    out.print()
    # Paths are printed without line breaks, so that they can be copied.
    for label, file in [
        *(("picture", picture) for picture in result.pictures),
        ("table", "table.md"),
        ("numbers", "result.json"),
    ]:
        out.print(f"{label + ':':9}{record.folder / file}", markup=False, soft_wrap=True)
    out.print(
        f"again:   {record.command}   ({_duration(record.minutes)} on this machine)", markup=False, soft_wrap=True
    )


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table of texts."""
    console().print(as_rich(TextTable("", columns, rows)))


def as_rich(table: TextTable, bold: int | None = None) -> RichTable:
    """The table for rich, without its columns of prose, which are in table.md. Row `bold` is printed in bold."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = [index for index, column in enumerate(table.columns) if column not in table.prose]
    drawn = RichTable(title=Text(table.title), box=box.SIMPLE_HEAD, title_justify="left")
    for index in shown:
        # The name of a row is not broken, unless it is a sentence.
        first = min(24, max((len(row[index]) for row in table.rows), default=0)) if index == 0 else None
        drawn.add_column(Text(table.columns[index]), justify="left" if index == 0 else "right", min_width=first)
    for place, row in enumerate(table.rows):
        drawn.add_row(*(Text(row[index]) for index in shown), style="bold" if place == bold else None)
    return drawn


def _duration(minutes: float) -> str:
    return f"{minutes:.1f} minutes" if minutes >= 1 else f"{60 * minutes:.1f} seconds"


def printable(name: str) -> str:
    """A text such as the name of a file, with escapes for letters that a terminal or JSON cannot show."""
    shown = name.encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in shown)
