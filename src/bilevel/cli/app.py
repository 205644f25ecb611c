"""`bilevel app`: a local page that learns classes from a few pictures and recognises new ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bilevel.cli.train import THREADS


def command(
    run: Annotated[
        str | None,
        typer.Argument(
            help="The folder of a run, a saved learner, zoo:NAME, or a classifier that was saved by the page or by "
            "`bilevel classify --save`. If not given, a model of the zoo is chosen for the pictures."
        ),
    ] = None,
    support: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Begin with these labelled pictures: a folder with one folder of pictures per class."
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="The port of the page; if not given, 8642, or a free one if that is in use."
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--open/--no-open", help="Whether to open the page in a browser.")] = True,
    threads: THREADS = None,
) -> None:
    """Open a local page that learns classes from pictures that you draw or drop.

    Draw or drop a few pictures of each class, and new pictures are recognised at once.

    Only this computer can open the page. It needs no network and writes no files, unless you save the classifier.
    Ctrl-C ends it.
    """
    from bilevel.cli import _serving

    desk, notes = _serving.desk(run, support)
    for note in notes:
        typer.echo(note, err=True)
    _serving.serve(desk, port, show)
