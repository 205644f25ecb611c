"""`bilevel classify RUN`: predictions for new pictures, from a few labelled pictures of each class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from bilevel.cli._output import check_writable
from bilevel.cli.train import AS_JSON, THREADS
from bilevel.errors import BilevelError

# Options that `bilevel export` has too.
STEPS = Annotated[int | None, typer.Option(min=1, help="Inner steps T; the model's own if not given.")]
STRICT = Annotated[
    bool, typer.Option("--strict", help="Stop at pictures that cannot be read, instead of leaving them out.")
]


def command(
    query: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="The new pictures: a folder, searched at any depth, or one file. If it has folders named like the "
            "classes, the accuracy is printed too.",
        ),
    ],
    run: Annotated[
        str | None,
        typer.Argument(
            help="The folder of a run, a saved learner, zoo:NAME, or a classifier that --save wrote. If not given, a "
            "model of the zoo is chosen for the pictures."
        ),
    ] = None,
    support: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="A folder with one folder of pictures per class, with any number of pictures. Not needed for a "
            "classifier that --save wrote.",
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.safetensors",
            help="Save the classifier, with the labelled pictures as the model sees them. Use it with: bilevel "
            "classify FILE.safetensors --query new/.",
        ),
    ] = None,
    none: Annotated[
        float | None,
        typer.Option(metavar="RATE", help='Predict "none of these" with this false-alarm rate, for example 0.05.'),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many classes the table shows for each picture.")] = 2,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all probabilities as CSV.")] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the labelled pictures and the predictions.")
    ] = None,
    as_json: AS_JSON = False,
    steps: STEPS = None,
    invert: Annotated[
        bool | None,
        typer.Option(
            "--invert/--no-invert",
            help="Whether to swap light and dark. If not given: for models of drawings (light ink on black), pictures "
            "whose ink is darker than the paper are swapped.",
            show_default=False,
        ),
    ] = None,
    clean: Annotated[
        bool,
        typer.Option(
            "--clean/--no-clean",
            help="For models of drawings: even out the paper, crop to the ink where it is small or far from the "
            "middle, and redraw thin or thick strokes. --picture shows both versions.",
        ),
    ] = True,
    strict: STRICT = False,
    batch_norm: Annotated[
        str | None,
        typer.Option(
            help="episode, support or running. If not given: support, also for models trained with episode, so that a "
            "prediction does not depend on the other new pictures."
        ),
    ] = None,
    threads: THREADS = None,
) -> None:
    """Classify new pictures by a few labelled ones.

    The representation is trained already, so a few labelled pictures of each class are enough.

    The classes are yours and need not be those of the training. Pictures of any size and kind are converted to inputs
    of the model, and the conversions are printed. Probabilities are calibrated if `bilevel evaluate` has calibrated the
    model on its meta-validation. Pictures of another kind than those of the training may need another temperature.

    Batch norm: a model trained with `episode` normalises a query set by its own statistics. With few queries, or
    queries of few classes, these are poor, so `support` is used here. To measure the difference for a model, compare
    bilevel evaluate RUN --queries 1 with and without --batch-norm support.
    """
    for file in (csv, picture, save):
        if file is not None:
            check_writable(file, str(file))
    if picture is not None and picture.suffix.lower() != ".png":
        raise BilevelError(f"--picture {picture} must have a name that ends in .png, because it is written as PNG.")
    if save is not None and save.suffix != ".safetensors":
        raise BilevelError(f"--save {save} must have a name that ends in .safetensors, because that is its format.")

    from bilevel.cli import _classification

    options = _classification.ClassifyOptions(batch_norm, steps, invert, clean, strict, none)
    result = _classification.classify(run, support, query, options, outputs=(csv, picture, save))
    if save is not None:
        result.save(save)
    if csv is not None:
        result.write_csv(csv)
    if picture is not None:
        from bilevel.cli._classification_picture import draw

        draw(result, picture)
    if as_json:
        typer.echo(json.dumps(result.plain(), indent=1))
    else:
        _classification.show(result, top)
        for label, file in (("table", csv), ("picture", picture), ("classifier", save)):
            if file is not None:
                typer.echo(f"{label}: {file}")
