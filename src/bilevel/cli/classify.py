"""`bilevel classify RUN`: a few labelled pictures of each class in, predictions for new pictures out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from bilevel.cli.train import THREADS
from bilevel.errors import BilevelError


def command(
    run: Annotated[str, typer.Argument(help="The folder of a run, a saved learner, or zoo:NAME.")],
    support: Annotated[
        Path, typer.Option(metavar="DIR", help="A folder with one folder of pictures per class; any numbers of them.")
    ],
    query: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="The new pictures: a folder, searched at any depth, or one file. Where it has folders named like the "
            "classes, the accuracy is reported too.",
        ),
    ],
    top: Annotated[int, typer.Option(min=1, help="How many classes the table names for each picture.")] = 2,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all probabilities as CSV.")] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the labelled pictures and the predictions.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs, and nothing else.")] = False,
    steps: Annotated[int | None, typer.Option(min=1, help="Inner steps T; the model's own if not given.")] = None,
    invert: Annotated[
        bool | None,
        typer.Option(
            "--invert/--no-invert",
            help="Whether to swap light and dark. If not given: models of drawings (light ink on black) swap pictures "
            "whose borders are light.",
            show_default=False,
        ),
    ] = None,
    batch_norm: Annotated[
        str | None,
        typer.Option(
            help="episode, support or running. If not given: support, also for models trained with episode, so that a "
            "prediction does not depend on which other pictures are asked about."
        ),
    ] = None,
    threads: THREADS = None,
) -> None:
    """Classify new pictures by a few labelled ones, with a representation that was trained before.

    The classes are yours and need not be those of the training. Pictures of any size and kind are converted to what the
    model takes, and what was done is said. Probabilities are those of the adapted classifier; they are not calibrated.

    Batch norm: a model trained with `episode` normalises a query set by its own statistics. With few queries, or
    queries of few classes, these are poor, so `support` is used here. For how much that is with a given model, compare
    bilevel evaluate RUN --queries 1 with the same and --batch-norm support.
    """
    for file, ending in ((csv, None), (picture, ".png")):
        _check_target(file, ending)

    from bilevel.cli import _classification

    result = _classification.classify(
        run, support, query, batch_norm=batch_norm, steps=steps, invert=invert, threads=threads, outputs=(csv, picture)
    )
    if csv is not None:
        result.write_csv(csv)
    if picture is not None:
        from bilevel.cli._classification_picture import draw

        draw(result, picture)
    if as_json:
        typer.echo(json.dumps(result.plain(), indent=1))
    else:
        _classification.show(result, top)
        for label, file in (("table", csv), ("picture", picture)):
            if file is not None:
                typer.echo(f"{label}: {file}")


def _check_target(file: Path | None, ending: str | None) -> None:
    """What could keep a result from being written is found before the work, not after."""
    if file is None:
        return
    if file.is_dir() or not file.parent.is_dir():
        why = "it is a folder" if file.is_dir() else f"there is no folder {file.parent}"
        raise BilevelError(f"{file} cannot be written: {why}.")
    if ending is not None and file.suffix.lower() != ending:
        raise BilevelError(f"--picture {file} is drawn as PNG; give it a name that ends in {ending}.")
