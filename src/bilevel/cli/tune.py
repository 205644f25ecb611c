"""`bilevel tune DATA --target NAME`: models of a table, tuned and compared with scikit-learn's."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from bilevel.cli.train import THREADS

SEPARATOR = Annotated[
    str | None, typer.Option(metavar="CHAR", help="Between the fields of a CSV file; guessed if not given. Or: tab.")
]
DECIMAL = Annotated[str, typer.Option(metavar="CHAR", help="The decimal mark of a CSV file.")]
THOUSANDS = Annotated[
    str | None, typer.Option(metavar="CHAR", help="Between the thousands of a CSV file's numbers, as in 1,200.")
]
ENCODING = Annotated[str | None, typer.Option(metavar="NAME", help="Of a CSV file; UTF-8 if not given.")]
SHEET = Annotated[str | None, typer.Option(metavar="NAME", help="The sheet of an Excel workbook, if it has several.")]
READING = ("separator", "decimal", "thousands", "encoding", "sheet")


def command(
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="A table with a header: CSV, also with gzip, Parquet or Excel.")
    ],
    target: Annotated[str, typer.Option(metavar="NAME", help="The column to predict.")],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="additive|ridge|elastic-net|logistic",
            help="Which of our models: curves, categories and pairs; or a linear one. If not given, all that can "
            "predict the target, and the best is saved.",
        ),
    ] = None,
    classes: Annotated[bool, typer.Option("--classes", help="Numbers in the target are names of classes.")] = False,
    penalty: Annotated[
        str | None,
        typer.Option(
            metavar="shared|per-feature|groups",
            help="One penalty for all features, for each, or for each group. [per-feature, or groups with --group]",
        ),
    ] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN=NAME|FILE|prefix|columns",
            help="Features that share a penalty: columns whose names match a pattern with * (may be repeated), a CSV "
            'file with the columns `column` and `group`, a JSON file {"group": ["column", …]}, `prefix` for names that '
            "agree up to the first _ - or ., or `columns` for the indicators of a column together.",
        ),
    ] = None,
    groups: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A column of labels: rows with one label are never split, such as a person."),
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A column of dates or numbers: models are tested on later rows only."),
    ] = None,
    cv: Annotated[int, typer.Option(metavar="K", help="Folds, of the comparison and of the tuning inside it.")] = 5,
    repeats: Annotated[int, typer.Option(metavar="N", help="How often the folds are drawn, if time allows.")] = 4,
    minutes: Annotated[
        float, typer.Option(help="About how long the comparison may take; the first round of folds is always finished.")
    ] = 2.0,
    seed: Annotated[int, typer.Option(help="Seed of the folds.")] = 0,
    drop: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A column to leave out; may be repeated.")
    ] = None,
    categorical: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A column to turn into indicators, one for each value; may be repeated."),
    ] = None,
    one_hot: Annotated[bool, typer.Option("--one-hot", help="Turn every text column into indicators.")] = False,
    missing: Annotated[
        str,
        typer.Option(
            metavar="error|median|drop",
            help="Empty fields: refuse them, fill them in (the training rows' median, or commonest value of text), or "
            "leave their rows out.",
        ),
    ] = "error",
    weights: Annotated[str | None, typer.Option(metavar="NAME", help="A column of sample weights.")] = None,
    l1_ratio: Annotated[
        float | None, typer.Option(help="Share of the absolute values in the elastic net's penalty. [0.5]")
    ] = None,
    max_iter: Annotated[int, typer.Option(min=1, help="Hyperiterations at most.")] = 100,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The results go there; results/tune-DATA if not given.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a finished result in DIR.")] = False,
    separator: SEPARATOR = None,
    decimal: DECIMAL = ".",
    thousands: THOUSANDS = None,
    encoding: ENCODING = None,
    sheet: SHEET = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs, and nothing else.")] = False,
    threads: THREADS = None,
) -> None:
    """Tune models of a table, and compare them with others.

    Repeated cross-validation compares them with scikit-learn's, and the best of ours is saved.

    All models see the same rows, features and folds: ours, with penalties tuned by hypergradients, and RidgeCV,
    LassoCV, ElasticNetCV or LogisticRegressionCV, a random forest and gradient boosting. The model with the least error
    is recommended, also if it is not ours. DIR gets model.safetensors, for `bilevel predict DIR new.csv`, table.csv
    with the coefficients or terms and their penalties, result.json, page.html and a picture, with the curves of an
    additive model. DATA is only read.
    """
    given = locals()
    from bilevel.cli import _tuning
    from bilevel.tabular.settings import TuneSettings

    given |= {name: tuple(given[name] or ()) for name in ("drop", "categorical", "group")}
    settings = TuneSettings(**{field.name: given[field.name] for field in fields(TuneSettings)})
    folder = out or Path("results") / f"tune-{Path(data.name.removesuffix('.gz')).stem}"
    reading = {name: given[name] for name in READING}
    record = _tuning.run(data, settings, folder, reading, force=force, threads=threads, quiet=as_json)
    if as_json:
        typer.echo(json.dumps(record, indent=1, ensure_ascii=False))
    else:
        _tuning.show(record, folder)
