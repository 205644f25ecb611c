"""The work of `bilevel predict`. Kept in its own module so that `--help` does not import torch."""

from __future__ import annotations

import gzip
import io
from pathlib import Path
from typing import Any

import numpy as np

from bilevel import extras
from bilevel.cli._output import check_writable
from bilevel.errors import BilevelError
from bilevel.experiments.records import plain
from bilevel.files import write_bytes
from bilevel.tabular.model import TableModel, TablePredictions, load
from bilevel.tabular.reading import DataTable, read_table
from bilevel.tabular.scores import measures, table_score
from bilevel.tabular.values import labels_of, numbers_of

# The pandas method that writes a table, by the suffix of the file. Other formats are refused. All other files are CSV.
WRITERS = {".parquet": "to_parquet", ".pq": "to_parquet", ".xlsx": "to_excel"}
NOT_WRITTEN = {".arrow", ".db", ".dta", ".feather", ".h5", ".json", ".ods", ".pkl", ".sav", ".xls", ".xml", ".zip"}


def predict(
    model_path: Path, data: Path, out: Path | None, reading: dict[str, Any], *, proba: bool, only: bool
) -> tuple[dict[str, Any], str]:
    """Predict every row, and write the file if `out` is given. Returns the result as JSON types, and as CSV text."""
    check_out(data, out)
    model = load(model_path)
    if proba and not model.classes:
        raise BilevelError(
            f"--proba needs a model of classes, and {model_path} predicts the number {model.target!r}. Leave it out."
        )
    table = read_table(data, **reading)
    predictions = model.predict(table.frame, str(data))
    score, notes = tested(model, table, predictions)
    result: dict[str, Any] = {"predictions": predictions.values, "score": score, "notes": [*predictions.notes, *notes]}
    columns = {"prediction": predictions.values}
    if proba and predictions.probabilities is not None:
        result["probabilities"] = dict(zip(model.classes, predictions.probabilities.T.tolist(), strict=True))
        columns |= {f"probability_{name}": values for name, values in result["probabilities"].items()}
    writer = WRITERS.get(out.suffix.lower()) if out is not None else None
    frame = with_columns(table, columns, only, reading, as_text=writer is None)
    if writer is not None and out is not None:
        buffer = io.BytesIO()
        getattr(frame, writer)(buffer, index=False)
        write_bytes(out, buffer.getvalue())
        return plain(result), ""
    text = frame.to_csv(index=False, sep=table.separator or ",", lineterminator="\n")
    if out is not None:
        content = text.encode()
        write_bytes(out, gzip.compress(content, mtime=0) if out.suffix.lower() == ".gz" else content)
    return plain(result), text


def check_out(data: Path, out: Path | None) -> None:
    """Refuse an output file that cannot be written, or that is the input, before any work."""
    if out is None:
        return
    check_writable(out, f"--out {out}")
    if out.suffix.lower() in NOT_WRITTEN:
        raise BilevelError(f"--out {out} cannot be written as {out.suffix}. Write .csv, .csv.gz, .parquet or .xlsx.")
    if out.exists() and data.exists() and out.samefile(data):
        raise BilevelError(f"--out {out} is the table itself, which is never overwritten; pass another file.")


def tested(model: TableModel, table: DataTable, predictions: TablePredictions) -> tuple[dict[str, Any], list[str]]:
    """The errors on rows whose target is known, as numbers and as sentences."""
    name, classes = model.target, model.classes
    if name not in table.columns:
        return {}, []
    truth = (labels_of if classes else numbers_of)(table.frame[name])
    known = np.isin(truth, classes) if classes else np.isfinite(truth)
    known &= np.array([value is not None for value in predictions.values])
    if not known.any():
        return {}, [f"{table.path} has the target {name!r}, but no value of it that the model could have predicted."]
    probabilities = predictions.probabilities
    predicted = np.array(predictions.values, dtype=object) if probabilities is None else probabilities
    score = table_score(truth[known], predicted[known].astype(float), classes=classes)
    rows, others = int(known.sum()), int((~known).sum())
    notes = (
        [f"{others} of {len(known)} rows have no {name!r} or no prediction and are not included in the errors."]
        if others
        else []
    )
    seen = table.sha256 == model.facts.get("sha256")
    warning = " The model was tuned on this file, so the errors are too small." if seen else ""
    errors = ", ".join(f"{word} {score[key]:.4g}" for key, word in measures(classes).items())
    notes.append(f"Errors on {rows:,} rows with {name!r}: {errors}.{warning}")
    return {**score, "rows": rows}, notes


def with_columns(
    table: DataTable, columns: dict[str, list[Any]], only: bool, reading: dict[str, Any], as_text: bool
) -> Any:
    """The rows of the table with the new columns. With `as_text`, the values are as they are written in a CSV file."""
    pandas = extras.load("pandas", extra="table", purpose="Writing a table")
    added = pandas.DataFrame({name: pandas.Series(values, dtype=object) for name, values in columns.items()})
    added = added if as_text else added.infer_objects()
    if only:
        return added
    if taken := [name for name in columns if name in table.columns]:
        raise BilevelError(
            f"{table.path} has a column {taken[0]!r} already; rename it, or write --only for the predictions alone."
        )
    # A CSV file is read again as text, so that 1.50 stays 1.50.
    frame = read_table(table.path, **reading, as_text=True).frame if as_text and table.kind == "CSV" else table.frame
    return pandas.concat([frame, added], axis=1)
