"""`bilevel demo`: the main job at a small size, as a first look."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bilevel.cli._output import show
from bilevel.experiments.base import reproduce

# Enough seeds for a spread and enough hyperiterations for the paper's shape, in well under a minute.
DEMO = {"seeds": "8", "iterations": "200"}


def command(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The results go to DIR/demo/.")] = Path("results"),
) -> None:
    """Show what it does: the paper's Table 5, small.

    Learns 30 regularisation coefficients by hypergradients, prints the errors beside the paper's and saves a picture.
    """
    typer.echo(
        "Ridge regression with a regularisation coefficient per feature: 30 features, 5 of them informative, 30 points "
        "to train on."
    )
    typer.echo("The coefficients are learned on 30 validation points by differentiating T steps of gradient descent.\n")
    result, record = reproduce("ridge", DEMO, out=out, folder="demo")
    show(result, record)
    typer.echo("\nThe full table, with more data sets: bilevel run ridge")
