"""`bilevel evaluate RUN`: the accuracy of a trained model on classes that it has never seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from bilevel.cli.train import AS_JSON, DATA_ROOT, THREADS
from bilevel.errors import BilevelError
from bilevel.experiments.overrides import pairs


def command(
    run: Annotated[str, typer.Argument(help="The folder of a run, or zoo:NAME.")],
    episodes: Annotated[int, typer.Option(min=2, help="Episodes of meta-validation, and of meta-test.")] = 600,
    steps: Annotated[str, typer.Option(metavar="FROM-TO", help="Numbers of inner steps T to try.")] = "1-20",
    ways: Annotated[int | None, typer.Option(min=2, help="Classes in an episode; the run's if not given.")] = None,
    shots: Annotated[
        int | None, typer.Option(min=1, help="Support images of each class; the run's if not given.")
    ] = None,
    queries: Annotated[int | None, typer.Option(min=1, help="Queries of each class; the run's if not given.")] = None,
    batch_norm: Annotated[
        str | None, typer.Option(help="episode or support: the batch norm mode; that of the training if not given.")
    ] = None,
    mirror: Annotated[
        bool | None,
        typer.Option(
            "--mirror/--no-mirror", help="Whether to use the mean features of a picture and its mirror image."
        ),
    ] = None,
    learner: Annotated[
        str | None, typer.Option(help="Evaluate the model's network with another learner, for example ridge-head.")
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of --learner; may be repeated."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The seed of the episodes; the run's own if not given.")] = None,
    as_json: AS_JSON = False,
    save: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Write the weights and their card to PATH.safetensors and .json."),
    ] = None,
    half: Annotated[
        bool,
        typer.Option("--half", help="Round the weights to half precision before; --save writes half as many bytes."),
    ] = False,
    data_root: DATA_ROOT = None,
    threads: THREADS = None,
) -> None:
    """Evaluate a trained model on classes that it has never seen.

    It prints the accuracy with its 95 % interval on meta-validation for every T, and on meta-test for the best T.
    """
    first, last = _range(steps)

    import torch

    from bilevel.cli._evaluation import evaluate, show

    given = {"ways": ways, "shots": shots, "queries": queries}
    if change and learner is None:
        raise BilevelError(f"--set {change[0]} needs --learner NAME; `bilevel list learners` lists the names.")
    changes = {name: number for name, number in given.items() if number is not None}
    result = evaluate(
        run,
        episodes,
        first,
        last,
        changes,
        batch_norm,
        mirror,
        learner,
        pairs(change or []),
        seed,
        data_root,
        save,
        torch.float16 if half else None,
    )
    if as_json:
        typer.echo(json.dumps(result, indent=1))
    else:
        show(result)


def _range(text: str) -> tuple[int, int]:
    """The first and last number of "1-20", or of "5".

    >>> _range("1-20"), _range("5")
    ((1, 20), (5, 5))
    """
    first, _, last = text.partition("-")
    try:
        low, high = int(first), int(last or first)
    except ValueError:
        low, high = 0, 0
    if not 1 <= low <= high:
        raise BilevelError(
            f"--steps {text} is not a range of numbers of inner steps; write --steps 1-20, or --steps 5."
        )
    return low, high
