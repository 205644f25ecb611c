"""What `bilevel predict` does; apart, because it needs numpy and pandas."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bilevel.errors import BilevelError
from bilevel.experiments.records import plain
from bilevel.tabular.model import Predictions, TableModel, load
from bilevel.tabular.reading import Table, read_table
from bilevel.tabular.scores import class_score, regression_score
from bilevel.tabular.values import Values, look
from bilevel.training.files import write_bytes

COLUMN = "prediction"


@dataclass(frozen=True)
class Result:
    """Predictions, ready to be written.

    Args:
        values: the prediction of every row.
        csv: the text of the CSV file.
        notes: what was done on the way.
        score: errors, where the table has the target.
        scored: the same in a sentence.
        probabilities: by class, where asked for.
    """

    values: list[Any]
    csv: str
    notes: list[str]
    score: dict[str, Any]
    scored: str
    probabilities: dict[str, list[float]] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        found = {"predictions": self.values, "score": self.score, "notes": self.notes}
        return plain(found | ({"probabilities": self.probabilities} if self.probabilities else {}))


def predict(
    model_path: Path, data: Path, out: Path | None, *, reading: dict[str, Any], proba: bool, only: bool
) -> Result:
    """Predict every row, and write the file if there is one to write."""
    check_out(data, out)
    model = load(model_path)
    if proba and not model.target.classes:
        raise BilevelError(f"--proba needs a model of classes; {model_path} predicts the number {model.target.name!r}.")
    table = read_table(data, **reading)
    found = model.predict(table.frame, str(data))
    score, scored, note = judged(model, table, found)
    columns: dict[str, list[Any]] = {COLUMN: found.values}
    chances: dict[str, list[float]] = {}
    if proba and found.probabilities is not None:
        chances = dict(zip(model.target.classes, found.probabilities.T.tolist(), strict=True))
        columns |= {f"probability_{name}": values for name, values in chances.items()}
    text = as_csv(table, columns, only, reading)
    if out is not None:
        write_bytes(out, text.encode())
    return Result(found.values, text, [*found.notes, *([note] if note else [])], score, scored, chances)


def check_out(data: Path, out: Path | None) -> None:
    """What could keep the file from being written is found before the work, and the input is never it."""
    if out is None:
        return
    if out.is_dir() or not out.absolute().parent.is_dir():
        why = "it is a folder" if out.is_dir() else f"there is no folder {out.parent}"
        raise BilevelError(f"--out {out} cannot be written: {why}.")
    if out.exists() and data.exists() and out.samefile(data):
        raise BilevelError(f"--out {out} is the table itself, which is never written over; pass another file.")


def judged(model: TableModel, table: Table, found: Predictions) -> tuple[dict[str, Any], str, str]:
    """The errors where the target is known: as numbers, as a sentence, and a note on rows that do not count."""
    name = model.target.name
    if name not in table.columns:
        return {}, "", ""
    values = look(table.frame[name])
    known = _known(model, values) & np.array([value is not None for value in found.values])
    if not known.any():
        return {}, "", f"{table.path} has the target {name!r}, but no value of it that the model could have predicted."
    truth, ones = model.target.encode(values)[known], np.ones(int(known.sum()))
    if model.target.classes:
        assert found.probabilities is not None
        score = class_score(truth, found.probabilities[known], ones)
        numbers = {"accuracy": score.share, "log_loss": score.main, "rows": len(truth)}
        said = f"accuracy {score.share:.4g}, log loss {score.main:.4g}"
    else:
        score = regression_score(truth, np.array(found.values, dtype=object)[known].astype(float), ones)
        numbers = {"r2": score.share, "rmse": score.main, "rows": len(truth)}
        said = f"R² {score.share:.4g}, RMSE {score.main:.4g}"
    seen = table.sha256 == model.facts.get("sha256")
    warning = " The model was tuned on this very file, so they are too good." if seen else ""
    count = int((~known).sum())
    note = f"{count} of {len(known)} rows have no {name!r} or no prediction and do not count." if count else ""
    return numbers, f"Errors on {len(truth):,} rows with {name!r}: {said}.{warning}", note


def _known(model: TableModel, values: Values) -> Any:
    if model.target.classes:
        return model.target.encode(values) >= 0
    return np.isfinite(values.numbers)


def as_csv(table: Table, columns: dict[str, list[Any]], only: bool, reading: dict[str, Any]) -> str:
    """The rows as they were written, and the new columns."""
    from bilevel.tabular._packages import package

    pandas = package("pandas", "Writing a table")
    added = pandas.DataFrame({name: pandas.Series(values, dtype=object) for name, values in columns.items()})
    if not only:
        if taken := [name for name in columns if name in table.columns]:
            raise BilevelError(
                f"{table.path} has a column {taken[0]!r} already; rename it, or write --only for the predictions alone."
            )
        frame = table.frame
        if table.kind == "CSV":
            # Read again as text: 1.50 stays 1.50.
            frame = read_table(table.path, **reading, as_text=True).frame
        added = pandas.concat([frame, added], axis=1)
    return added.to_csv(index=False, sep=table.separator or ",", lineterminator="\n")
