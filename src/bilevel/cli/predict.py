"""`bilevel predict MODEL DATA`: the predictions of a tuned model for the rows of a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from bilevel.cli.tune import DECIMAL, ENCODING, READING, SEPARATOR, SHEET, THOUSANDS


def command(
    model: Annotated[Path, typer.Argument(help="The folder that `bilevel tune` wrote, or its model.safetensors.")],
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="A table with the model's columns: CSV, Parquet or Excel.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write to a file, not to the terminal: Parquet for .parquet, Excel for .xlsx, gzip for .gz, else CSV.",
        ),
    ] = None,
    proba: Annotated[
        bool, typer.Option("--proba", help="Add the probability of every class; they are not calibrated.")
    ] = False,
    only: Annotated[bool, typer.Option("--only", help="Leave the columns of DATA out.")] = False,
    separator: SEPARATOR = None,
    decimal: DECIMAL = ".",
    thousands: THOUSANDS = None,
    encoding: ENCODING = None,
    sheet: SHEET = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs, and nothing else.")] = False,
) -> None:
    """Predict a table with a model that `bilevel tune` saved.

    The output is CSV: the unchanged rows of DATA, and a column `prediction` (with --proba, also one for each class).
    Columns that the model does not use are kept. A missing column is an error that names it. If DATA has the target,
    the errors of the predictions are printed too. Notes go to standard error, so that the output can be piped.
    """
    given = locals()
    from bilevel.cli import _predicting

    reading = {name: given[name] for name in READING}
    result, text = _predicting.predict(model, data, out, reading, proba=proba, only=only)
    if as_json:
        typer.echo(json.dumps(result, indent=1, ensure_ascii=False))
        return
    if out is None:
        typer.echo(text, nl=False)
    for note in result["notes"]:
        typer.echo(note, err=True)
    if out is not None:
        typer.echo(f"{len(result['predictions']):,} predictions: {out}")
