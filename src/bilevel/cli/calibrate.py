"""`bilevel calibrate RUN`: probabilities that mean what they say, for several numbers of classes and examples."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from bilevel.cli.train import DATA_ROOT, THREADS


def command(
    run: Annotated[str, typer.Argument(help="The folder of a run, or a saved learner.")],
    episodes: Annotated[int, typer.Option(min=2, help="Episodes on each of the two splits, for every shape.")] = 100,
    batch_norm: Annotated[
        str | None, typer.Option(help="The mode in which it will be used, if not the one that classify uses.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the episodes; the run's own if not given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs, and nothing else.")] = False,
    data_root: DATA_ROOT = None,
    threads: THREADS = None,
) -> None:
    """Calibrate the probabilities of a trained model.

    Temperatures and thresholds of "none of these" are fitted on meta-validation and measured on meta-test.

    They are kept in the run's folder or in the saved learner's card, where `bilevel classify` finds them. Weights and
    scores stay as they are.
    """
    from bilevel.cli._calibrating import calibrate, show

    made = calibrate(run, episodes, batch_norm, seed, data_root, threads)
    if as_json:
        typer.echo(json.dumps([one.plain() for one in made], indent=1))
    else:
        show(run, made)
