"""`bilevel data`: list, verify, prepare and download data sets."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bilevel.cli.list import columns
from bilevel.errors import BilevelError

if TYPE_CHECKING:
    from bilevel.data.base import Source

ACTIONS = ("list", "verify", "prepare", "download")


def command(
    action: Annotated[str, typer.Argument(help="list, verify, prepare or download.")] = "list",
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Data sets, or paths of folders with one folder per class.", metavar="[NAME]..."),
    ] = None,
    root: Annotated[
        Path | None,
        typer.Option("--data-root", metavar="DIR", help="The folder of the files; or set BILEVEL_DATA."),
    ] = None,
    size: Annotated[
        int | None,
        typer.Option("--image-size", min=1, help="Scale a folder's images to this number of pixels per side."),
    ] = None,
) -> None:
    """List, verify, prepare or download data sets.

    `list` prints which data sets are there. `verify` reads and checks every file. `prepare` decodes the images and
    caches them, so that a training starts at once. `download` downloads Omniglot.
    """
    if action not in ACTIONS:
        raise BilevelError(f"There is no action {action!r}; write bilevel data {' | '.join(ACTIONS)}.")
    from bilevel.data import find, places

    where = places.data_root(root)
    if action == "list":
        _list(where)
        return
    if not names:
        listed = ", ".join(name for name in find() if name != "folder")
        raise BilevelError(f"bilevel data {action} needs the name of a data set ({listed}) or the path of a folder.")
    for name in names:
        typer.echo(_do(action, name, where, {} if size is None else {"size": size}))


def _do(action: str, name: str, where: Path, settings: dict[str, Any]) -> str:
    from bilevel.data.base import source
    from bilevel.data.cache import Workspace, report_bar

    data_source = source(name, settings)
    if action == "download":
        return "\n".join(f"{name}: {path}" for path in data_source.fetch(where))
    if action == "verify":
        with report_bar(f"verifying {name}", None) as report:
            return f"{name}: {data_source.check(where, Workspace(report))}."
    data = data_source.load(where)
    return "\n".join([data.describe(), *(f"  {note}" for note in data.notes)])


def _list(where: Path) -> None:
    from bilevel.data import find, places

    rows = [("name", "state", "")]
    for name, kind in find().items():
        rows.append((name, _state(kind, where), (sys.modules[kind.__module__].__doc__ or "").partition("\n")[0]))
    columns(rows)
    typer.echo(
        f"\nLooked in {places.describe(where)}.\nDecoded images are kept in {places.cache_root()} (BILEVEL_CACHE)."
    )


def _state(kind: type[Source], where: Path) -> str:
    if kind.name == "folder":
        return "your path"
    if not kind.needs_files:
        return "built in"
    try:
        kind().files(where)
    except BilevelError:
        return "missing"
    return "found"
