"""What `bilevel app` does. Kept in its own module so that `--help` does not import torch."""

from __future__ import annotations

import webbrowser
from contextlib import suppress
from pathlib import Path

import torch
import typer

from bilevel.app.desk import AUTOMATIC, Desk
from bilevel.app.server import PageServer, listen
from bilevel.data.files import read_file
from bilevel.data.folder import class_files
from bilevel.data.pictures import UnreadablePicture
from bilevel.errors import BilevelError
from bilevel.learners.recognition import kept_classifier


def desk(spec: str | None, support: Path | None, threads: int | None) -> tuple[Desk, list[str]]:
    """What the page begins with, and a sentence for every picture that cannot be read."""
    if threads is not None:
        torch.set_num_threads(threads)
    kept = None if spec is None else kept_classifier(spec)
    if kept is not None and support is not None:
        raise BilevelError(f"{spec} has labelled pictures of its own; leave --support out.")
    if support is not None and not support.is_dir():
        raise BilevelError(
            f"--support {support} is no folder; pass one that holds a folder of pictures for each class."
        )
    made = Desk(AUTOMATIC if spec is None or kept is not None else spec)
    if kept is not None:
        made.keep(*kept)
    return made, [] if support is None else _teach(made, support)


def _teach(made: Desk, support: Path) -> list[str]:
    notes = []
    for name, files in class_files(support).items():
        number: int | None = None
        for file in files:
            try:
                if number is None:
                    number = made.add_class(name, read_file(file), file.name)
                else:
                    made.add_picture(number, read_file(file), file.name)
            except UnreadablePicture as error:
                notes.append(f"Note: {error}")
    return notes


def serve(made: Desk, port: int | None, show: bool) -> None:
    """Serve the page until Ctrl-C, which is how it ends."""
    opened = listen(port)
    made.state()  # loads the model, so that the page is there at once

    def ready(address: str) -> None:
        typer.echo(f"The page is at {address}   (Ctrl-C ends it)")
        if show:
            webbrowser.open(address)

    with opened, suppress(KeyboardInterrupt):
        PageServer(made, opened, ready).run()
    typer.echo("Stopped. Nothing was written.")
