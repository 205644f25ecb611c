"""The work of `bilevel app`. Kept in its own module so that `--help` does not import torch."""

from __future__ import annotations

import webbrowser
from contextlib import suppress
from pathlib import Path

import typer

from bilevel.app.desk import AUTOMATIC, Desk
from bilevel.app.server import PageServer, listen
from bilevel.data.folder import class_files, picture_contents
from bilevel.data.pictures import UnreadablePicture
from bilevel.errors import BilevelError
from bilevel.learners.recognition import saved_classifier


def desk(spec: str | None, support: Path | None) -> tuple[Desk, list[str]]:
    """The desk at the start of the page, and a sentence for every picture that cannot be read."""
    saved = None if spec is None else saved_classifier(spec)
    if saved is not None and support is not None:
        raise BilevelError(f"{spec} is a saved classifier with its own labelled pictures. Leave --support out.")
    if support is not None and not support.is_dir():
        raise BilevelError(
            f"--support {support} is not a folder; pass one that has a folder of pictures for each class."
        )
    new = Desk(AUTOMATIC if spec is None or saved is not None else spec)
    if saved is not None:
        new.use_saved(*saved)
    return new, [] if support is None else _add_classes(new, support)


def _add_classes(new: Desk, support: Path) -> list[str]:
    """Add the pictures of a folder to the desk. Returns a sentence for every picture that cannot be read."""
    notes = []
    for name, files in class_files(support).items():
        number: int | None = None
        for file in files:
            try:
                if number is None:
                    number = new.add_class(name, picture_contents(file), file.name)
                else:
                    new.add_picture(number, picture_contents(file), file.name)
            except UnreadablePicture as error:
                notes.append(f"Note: {error}")
    return notes


def serve(desk: Desk, port: int | None, show: bool) -> None:
    """Serve the page until Ctrl-C."""
    opened = listen(port)
    desk.state()  # loads the model, so that the page appears without delay

    def ready(address: str) -> None:
        typer.echo(f"The page is at {address}   (Ctrl-C ends it)")
        if show:
            webbrowser.open(address)

    with opened, suppress(KeyboardInterrupt):
        PageServer(desk, opened, ready).run()
    typer.echo("Stopped. Nothing was written.")
