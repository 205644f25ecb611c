"""`bilevel predict MODEL DATA`: predictions of a tuned model for the rows of a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from bilevel.cli.tune import DECIMAL, ENCODING, SEPARATOR


def command(
    model: Annotated[Path, typer.Argument(help="The folder that `bilevel tune` wrote, or its model.safetensors.")],
    data: Annotated[Path, typer.Argument(metavar="DATA", help="A CSV or Parquet file with the model's columns.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.csv", help="Write the CSV there, not on the terminal.")
    ] = None,
    proba: Annotated[
        bool, typer.Option("--proba", help="Add the probability of every class; they are not calibrated.")
    ] = False,
    only: Annotated[bool, typer.Option("--only", help="Leave the columns of DATA out.")] = False,
    separator: SEPARATOR = None,
    decimal: DECIMAL = ".",
    encoding: ENCODING = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs, and nothing else.")] = False,
) -> None:
    """Predict the rows of a table with a model that `bilevel tune` saved.

    What comes out is CSV: the rows of DATA as they are and in their order, and a column `prediction` (with --proba,
    also one for each class). Columns that the model does not know are kept and not used; a missing one is named. Where
    DATA has the target, the error is said too. Notes go to standard error, so that the output can be piped.
    """
    from bilevel.cli import _predicting

    result = _predicting.predict(
        model,
        data,
        out,
        reading={"separator": separator, "decimal": decimal, "encoding": encoding},
        proba=proba,
        only=only,
    )
    if as_json:
        typer.echo(json.dumps(result.plain(), indent=1, ensure_ascii=False))
        return
    if out is None:
        typer.echo(result.csv, nl=False)
    for note in [*result.notes, *([result.scored] if result.scored else [])]:
        typer.echo(note, err=True)
    if out is not None:
        typer.echo(f"{len(result.values):,} predictions: {out}")
