"""`bilevel calibrate RUN`: calibrated probabilities, for several numbers of classes and examples."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from bilevel.cli.train import AS_JSON, DATA_ROOT, THREADS


def command(
    run: Annotated[str, typer.Argument(help="The folder of a run, or a saved learner.")],
    episodes: Annotated[
        int, typer.Option(min=2, help="Episodes of each split, for every number of classes and examples.")
    ] = 100,
    batch_norm: Annotated[
        str | None,
        typer.Option(
            help="The batch norm mode in which the model will be used; that of `bilevel classify` if not given."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The seed of the episodes; the run's own if not given.")] = None,
    as_json: AS_JSON = False,
    data_root: DATA_ROOT = None,
    threads: THREADS = None,
) -> None:
    """Calibrate the probabilities of a trained model.

    Temperatures and thresholds of "none of these" are fitted on meta-validation and measured on meta-test.

    They are saved in the run's folder or in the saved learner's card, where `bilevel classify` finds them. Weights and
    scores are not changed.
    """
    from bilevel.cli._evaluation import calibrate, show_calibrations

    made = calibrate(run, episodes, batch_norm, seed, data_root)
    if as_json:
        typer.echo(json.dumps([one.plain() for one in made], indent=1))
    else:
        show_calibrations(run, made)
