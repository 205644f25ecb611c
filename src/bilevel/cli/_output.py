"""How a result is shown on the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from bilevel.experiments.base import CHOSEN, Result, Table
from bilevel.experiments.records import Record

if TYPE_CHECKING:
    from rich.table import Table as RichTable


def show(result: Result, record: Record) -> None:
    """The table, the choices behind it, and where everything was written."""
    from rich.console import Console

    # A pipe or a log file has no width of its own, and rich would fold the table to 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    for table in result.tables:
        console.print(as_rich(table))
    for note in result.notes:
        console.print(note, markup=False)
    if result.choices:
        console.print(f"\n{CHOSEN}:")
    for name, text in result.choices.items():
        console.print(f"  {name}: {text}", markup=False)
    assert record.folder is not None
    console.print()
    # Paths are printed without folding, so that they can be copied.
    for label, file in [
        *(("picture", picture) for picture in result.pictures),
        ("table", "table.md"),
        ("numbers", "result.json"),
    ]:
        console.print(f"{label + ':':9}{record.folder / file}", markup=False, soft_wrap=True)
    console.print(
        f"again:   {record.command}   ({_duration(record.minutes)} on this machine)", markup=False, soft_wrap=True
    )


def as_rich(table: Table) -> RichTable:
    """The table without its columns of prose, which are in table.md."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = [index for index, column in enumerate(table.columns) if column not in table.prose]
    drawn = RichTable(title=Text(table.title), box=box.SIMPLE_HEAD, title_justify="left")
    for index in shown:
        # A row's name stays whole, unless it is a sentence.
        first = min(24, max((len(row[index]) for row in table.rows), default=0)) if index == 0 else None
        drawn.add_column(Text(table.columns[index]), justify="left" if index == 0 else "right", min_width=first)
    for row in table.rows:
        drawn.add_row(*(Text(row[index]) for index in shown))
    return drawn


def _duration(minutes: float) -> str:
    return f"{minutes:.1f} minutes" if minutes >= 1 else f"{60 * minutes:.1f} seconds"
