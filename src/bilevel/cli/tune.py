"""`bilevel tune DATA --target NAME`: a linear model of a table with a tuned penalty for every feature."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from bilevel.cli.train import THREADS

SEPARATOR = Annotated[
    str | None, typer.Option(metavar="CHAR", help="Between the fields of a CSV file; guessed if not given. Or: tab.")
]
DECIMAL = Annotated[str, typer.Option(metavar="CHAR", help="The decimal mark of a CSV file.")]
ENCODING = Annotated[str | None, typer.Option(metavar="NAME", help="Of a CSV file; UTF-8 if not given.")]


def command(
    data: Annotated[Path, typer.Argument(metavar="DATA", help="A CSV file with a header, or a Parquet file.")],
    target: Annotated[str, typer.Option(metavar="NAME", help="The column to predict.")],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="ridge|elastic-net|logistic",
            help="If not given: logistic for text, truth values and numbers with two values, else ridge.",
        ),
    ] = None,
    penalty: Annotated[
        str | None,
        typer.Option(
            metavar="shared|per-feature|groups",
            help="One penalty for all features, for each, or for each group. [per-feature, or groups with --groups]",
        ),
    ] = None,
    groups: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|prefix|columns",
            help="Features that share a penalty: a CSV file with the columns `column` and `group`, a JSON file "
            '{"group": ["column", …]}, `prefix` for names that agree up to the first _ - or ., or `columns` for the '
            "indicators of a column together.",
        ),
    ] = None,
    cv: Annotated[int, typer.Option(metavar="K", help="Folds of the cross-validation inside the training rows.")] = 5,
    test: Annotated[float, typer.Option(metavar="FRACTION", help="The share of rows that no fit sees.")] = 0.25,
    seed: Annotated[int, typer.Option(help="Of the split and of the folds.")] = 0,
    drop: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A column to leave out; may be repeated.")
    ] = None,
    categorical: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A column to turn into indicators, one for each value; may be repeated."),
    ] = None,
    one_hot: Annotated[bool, typer.Option("--one-hot", help="Do so with every text column.")] = False,
    missing: Annotated[
        str,
        typer.Option(
            metavar="error|median|drop",
            help="Empty fields: refuse them, fill them in (the training rows' median, or commonest value of text), or "
            "leave their rows out.",
        ),
    ] = "error",
    weights: Annotated[str | None, typer.Option(metavar="NAME", help="A column of sample weights.")] = None,
    l1_ratio: Annotated[float, typer.Option(help="Of the elastic net.")] = 0.5,
    max_iter: Annotated[int, typer.Option(min=1, help="Hyperiterations at most.")] = 100,
    refit: Annotated[
        bool, typer.Option("--refit/--no-refit", help="Fit the saved model to all rows, with the tuned penalties.")
    ] = True,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The results go there; results/tune-DATA if not given.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a finished result in DIR.")] = False,
    separator: SEPARATOR = None,
    decimal: DECIMAL = ".",
    encoding: ENCODING = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs, and nothing else.")] = False,
    threads: THREADS = None,
) -> None:
    """Tune a linear model of a table, with a penalty of its own for every feature, and compare it with scikit-learn.

    A share of the rows is set aside. On the others, the penalties are tuned by the hypergradient of the
    cross-validation error, and RidgeCV (ElasticNetCV, LogisticRegressionCV) is tuned on the same folds; both are then
    judged on the rows set aside. DIR gets model.safetensors, for `bilevel predict DIR new.csv`, table.csv with the
    coefficients and penalties, result.json, page.html and a picture. DATA is only read.
    """
    chosen = penalty or ("groups" if groups is not None else "per-feature")
    settings: dict[str, Any] = {
        "target": target,
        "model": model,
        "penalty": chosen,
        "groups": groups,
        "cv": cv,
        "test": test,
        "seed": seed,
        "drop": tuple(drop or ()),
        "categorical": tuple(categorical or ()),
        "one_hot": one_hot,
        "missing": missing,
        "weights": weights,
        "l1_ratio": l1_ratio,
        "max_iter": max_iter,
        "refit": refit,
    }
    folder = out if out is not None else Path("results") / f"tune-{data.stem}"

    from bilevel.cli import _tuning

    record = _tuning.run(
        data,
        settings,
        folder,
        reading={"separator": separator, "decimal": decimal, "encoding": encoding},
        force=force,
        threads=threads,
        quiet=as_json,
        command=shlex.join(["bilevel", *sys.argv[1:]]),
    )
    if as_json:
        typer.echo(json.dumps(record, indent=1, ensure_ascii=False))
    else:
        _tuning.show(record, folder)
