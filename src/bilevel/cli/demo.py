"""`bilevel demo`: hyperparameter optimisation and meta-learning in small, as a first look."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bilevel.cli._output import show
from bilevel.experiments.base import reproduce

# Enough seeds for a standard deviation, and enough hyperiterations to see the effect of T, in half a minute.
RIDGE = {"seeds": "5", "iterations": "150"}
GLYPHS: dict[str, str] = {}
MODEL = "zoo:omniglot-5way-1shot"


def command(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The results go to DIR/demo/.")] = Path("results"),
) -> None:
    """Show what bilevel does, in about three minutes.

    It learns 30 regularisation coefficients and then a representation for few-shot learning, both by hypergradients.
    It prints the results, saves pictures, and writes an HTML page.
    """
    folder = out / "demo"
    typer.echo(
        "1 of 2. Hyperparameters: ridge regression with a regularisation coefficient per feature. Of 30 features 5 are "
        "informative, and there are 30 points to train on.\nThe coefficients are learned on 30 validation points by "
        "differentiating T steps of gradient descent. The result shows that they find the informative features, and "
        "that more steps give smaller errors, up to a point.\n"
    )
    show(*reproduce("ridge", RIDGE, out=folder))
    typer.echo(
        "\n2 of 2. Learning to learn: a network is trained such that T gradient steps on one drawing of each of 5 "
        "characters make a good classifier of its features.\nThe result is the accuracy on scripts that the network "
        "has never seen, compared with raw pixels, and with FirstOrder, a gradient that ignores how the classifier "
        "depends on the network.\nIt takes about two minutes, and half a minute more the first time, when "
        "the characters are drawn.\n"
    )
    try:
        show(*reproduce("glyphs", GLYPHS, out=folder))
    except KeyboardInterrupt:
        typer.echo(
            f"Interrupted. The first part is complete in {folder / 'ridge'}; nothing else was written.", err=True
        )
        raise typer.Exit(130) from None
    typer.echo(f"\nA page with all results, for a browser: {page(folder)}")
    typer.echo(
        "Next: bilevel train glyphs-5way-1shot (a longer training), bilevel evaluate zoo:omniglot-5way-1shot (a model "
        "trained on Omniglot), bilevel list (the tables and figures of the paper)."
    )


def page(folder: Path) -> Path:
    """Write the report of both parts and of one model of the zoo. It shows episodes of that model if Omniglot is
    there; nothing is downloaded."""
    from bilevel.report.page import write

    parts = [folder / name for name in ("ridge", "glyphs")]
    return write([*parts, MODEL], folder / "report.html", title="bilevel demo").path
