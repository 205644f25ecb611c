"""`bilevel run NAME`: reproduce one table or figure of the paper."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from bilevel.cli._output import show
from bilevel.cli.train import DATA_ROOT
from bilevel.experiments.base import reproduce
from bilevel.experiments.overrides import pairs


def command(
    name: Annotated[str, typer.Argument(help="An experiment, as `bilevel list` prints it.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="Run the experiment with smaller settings, in about a minute.")
    ] = False,
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change a setting; may be repeated. `bilevel list NAME` shows them."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="S", help="Short for --set seed=S.")] = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The results go to DIR/NAME/.")] = Path("results"),
    data_root: DATA_ROOT = None,
) -> None:
    """Reproduce a table or figure of the paper.

    The numbers, a table with the paper's numbers, and pictures are written to DIR/NAME/.
    """
    if data_root is not None:
        os.environ["BILEVEL_DATA"] = str(data_root)
    overrides = pairs(change or [])
    if seed is not None:
        overrides["seed"] = str(seed)
    result, record = reproduce(name, overrides, quick=quick, out=out)
    show(result, record)
