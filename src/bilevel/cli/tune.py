"""`bilevel tune DATA --target NAME`: tune models of a table, and compare them with scikit-learn's."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from bilevel.cli.train import THREADS

SEPARATOR = Annotated[
    str | None,
    typer.Option(metavar="CHAR", help="The separator of the fields of a CSV file, or `tab`; guessed if not given."),
]
DECIMAL = Annotated[str, typer.Option(metavar="CHAR", help="The decimal mark of a CSV file.")]
THOUSANDS = Annotated[
    str | None,
    typer.Option(metavar="CHAR", help="The separator of thousands in the numbers of a CSV file, as in 1,200."),
]
ENCODING = Annotated[str | None, typer.Option(metavar="NAME", help="The encoding of a CSV file; UTF-8 if not given.")]
SHEET = Annotated[str | None, typer.Option(metavar="NAME", help="The sheet of an Excel workbook, if it has several.")]
READING = ("separator", "decimal", "thousands", "encoding", "sheet")


def command(
    data: Annotated[
        Path,
        typer.Argument(metavar="DATA", help="A table with a header: CSV (also compressed by gzip), Parquet or Excel."),
    ],
    target: Annotated[str, typer.Option(metavar="NAME", help="The column to predict.")],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="additive|ridge|elastic-net|logistic",
            help="Which of our models: additive (curves, categories and pairs) or a linear one. If not given, all that "
            "can predict the target are tuned, and the best is saved.",
        ),
    ] = None,
    classes: Annotated[bool, typer.Option("--classes", help="The numbers in the target are names of classes.")] = False,
    penalty: Annotated[
        str | None,
        typer.Option(
            metavar="shared|per-feature|groups",
            help="One penalty for all features, one per feature, or one per group. [per-feature; with --group: groups]",
        ),
    ] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN=NAME|FILE|prefix|columns",
            help="Features that share a penalty: columns whose names match a pattern with * (may be repeated), a CSV "
            'file with the columns `column` and `group`, a JSON file {"group": ["column", …]}, `prefix` for names that '
            "are equal up to the first _ - or ., or `columns` for all indicators of one column.",
        ),
    ] = None,
    groups: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="A column of labels, such as a person: rows with the same label are in the same fold."
        ),
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A column of dates or numbers: models are only tested on later rows than those of the training.",
        ),
    ] = None,
    cv: Annotated[int, typer.Option(metavar="K", help="The number of folds, of the comparison and of the tuning.")] = 5,
    repeats: Annotated[
        int, typer.Option(metavar="N", help="How often the folds are drawn, if --minutes allows it.")
    ] = 4,
    minutes: Annotated[
        float,
        typer.Option(
            help="About how many minutes the comparison may take. The first round of folds is always finished."
        ),
    ] = 2.0,
    seed: Annotated[int, typer.Option(help="Seed of the folds.")] = 0,
    drop: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A column to leave out; may be repeated.")
    ] = None,
    categorical: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A column of numbers whose values are categories, as those of text are; may be repeated.",
        ),
    ] = None,
    one_hot: Annotated[bool, typer.Option("--one-hot", hidden=True)] = False,
    missing: Annotated[
        str,
        typer.Option(
            metavar="median|drop|error",
            help="Empty fields: fill them (with the median of the training rows, or the most frequent text; the "
            "additive model has an effect of a missing value instead), leave out their rows, or refuse them.",
        ),
    ] = "median",
    weights: Annotated[str | None, typer.Option(metavar="NAME", help="A column of sample weights.")] = None,
    l1_ratio: Annotated[
        float | None, typer.Option(help="The share of the L1 penalty in the elastic net. [0.5]")
    ] = None,
    max_iter: Annotated[int, typer.Option(min=1, help="The largest number of hyperiterations.")] = 100,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder of the results; results/tune-DATA if not given.")
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

    Repeated cross-validation compares our models with scikit-learn's. The best of ours is saved.

    All models use the same rows, features and folds: ours, with penalties tuned by hypergradients, and RidgeCV,
    LassoCV, ElasticNetCV or LogisticRegressionCV, a random forest and gradient boosting. The model with the smallest
    error is recommended, even if it is not ours. The folder gets model.safetensors, for `bilevel predict DIR new.csv`;
    table.csv with the coefficients or terms and their penalties; result.json; page.html; and a picture, with the curves
    of an additive model. DATA is not changed.
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
