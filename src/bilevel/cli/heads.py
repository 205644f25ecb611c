"""`bilevel heads --features file.npz`: few-shot classifiers on the features of a network of your own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from bilevel.cli._output import check_writable
from bilevel.cli.train import AS_JSON, THREADS
from bilevel.errors import BilevelError


def command(
    features: Annotated[
        Path, typer.Option(metavar="FILE.npz", help="A file with the arrays `features` (N×F) and `labels` (N).")
    ],
    query: Annotated[
        Path | None,
        typer.Option(metavar="FILE.npz", help="Classify the `features` of this file, instead of comparing heads."),
    ] = None,
    learner: Annotated[
        list[str] | None,
        typer.Option(
            help="A head; may be repeated to compare several. If not given, all heads, or ridge-head with --query."
        ),
    ] = None,
    ways: Annotated[int, typer.Option(min=2, help="Classes in an episode.")] = 5,
    shots: Annotated[int, typer.Option(min=1, help="Labelled rows of each class.")] = 1,
    queries: Annotated[int, typer.Option(min=1, help="Rows of each class to classify.")] = 15,
    episodes: Annotated[int, typer.Option(min=2, help="Episodes to choose T, and as many to test.")] = 600,
    seed: Annotated[int, typer.Option(min=0, help="The seed of the episodes and of the halves of classes.")] = 0,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="With --query: write all probabilities.")] = None,
    as_json: AS_JSON = False,
    threads: THREADS = None,
) -> None:
    """Compare few-shot heads on features of any network.

    With --query, a head classifies new features. Without it, heads are compared on episodes of the labelled features:
    half of the classes are used to compute the centre of the features and to choose T, the others to measure the
    accuracy. Write the file with np.savez(path, features=…, labels=…).
    """
    if csv is not None:
        if query is None:
            raise BilevelError(f"--csv {csv} is for the predictions of --query; pass --query too.")
        check_writable(csv, f"--csv {csv}")
    if query is not None and learner is not None and len(learner) > 1:
        raise BilevelError(f"--query uses one head, and {len(learner)} were given; pass one --learner.")

    from bilevel.cli import _heads

    if query is None:
        result = _heads.compare(features, tuple(learner or ()), ways, shots, queries, episodes, seed)
        typer.echo(json.dumps(result, indent=1)) if as_json else _heads.show_scores(result)
        return
    predicted = _heads.classify(features, query, learner[0] if learner else "ridge-head", csv)
    typer.echo(json.dumps(predicted, indent=1)) if as_json else _heads.show_answers(predicted)
