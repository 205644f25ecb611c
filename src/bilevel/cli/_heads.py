"""The work of `bilevel heads`. Kept in its own module so that `--help` does not import torch."""

from __future__ import annotations

import csv
import io
from collections import Counter
from pathlib import Path
from typing import Any

import typer

from bilevel.cli._classification import _as_text
from bilevel.cli._output import print_table
from bilevel.files import write_bytes
from bilevel.learners.features import HEADS, CachedFeatures, FeatureTrial, adapt


def compare(
    file: Path, names: tuple[str, ...], ways: int, shots: int, queries: int, episodes: int, seed: int
) -> dict[str, Any]:
    """The accuracies of the heads, all on the same episodes, as JSON types."""
    cached = CachedFeatures.load(file)
    trial = FeatureTrial(ways, shots, queries, episodes, seed)
    scores = trial.compare(cached, names or HEADS)
    lines = {
        name: {"accuracy": final.accuracy, "interval": final.interval, "steps": final.steps}
        for name, final in scores.items()
    }
    data = {"features": list(cached.features.shape), "classes": len(set(cached.known))}
    return {**data, "ways": ways, "shots": shots, "queries": queries, "episodes": episodes, "heads": lines}


def classify(labelled: Path, new: Path, name: str, out: Path | None) -> dict[str, Any]:
    """The predictions for new features, as JSON types; also written to `out` as CSV."""
    queries = CachedFeatures.load(new)
    head = adapt(CachedFeatures.load(labelled), name)
    classes = [str(label) for label in head.classifier.classes]
    rows = head.predict_proba(queries).tolist()
    predictions = [classes[max(range(len(row)), key=row.__getitem__)] for row in rows]
    result: dict[str, Any] = {"learner": name, "classes": classes, "predictions": predictions, "probabilities": rows}
    if queries.labels is not None:
        right = sum(answer == true for answer, true in zip(predictions, queries.labels, strict=True))
        result |= {"right": right, "accuracy": right / len(predictions)}
    if out is not None:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["row", "prediction", *(f"p({label})" for label in classes)])
        for number, (answer, row) in enumerate(zip(predictions, rows, strict=True)):
            writer.writerow([number, _as_text(answer), *(f"{p:.6f}" for p in row)])
        write_bytes(out, text.getvalue().encode())
    return result


def show_scores(result: dict[str, Any]) -> None:
    heads = result["heads"].items()
    cells = [(name, f"{line['accuracy']:.2%}", f"{line['interval']:.2%}") for name, line in heads]
    print_table(("head", "accuracy", "± 95 %"), cells)
    rows, columns = result["features"]
    typer.echo(
        f"{rows} rows of {columns} features, {result['classes']} classes; {result['ways']}-way {result['shots']}-shot, "
        f"{result['queries']} queries a class. The {result['episodes']} episodes are of classes that "
        "did not choose the centre or T."
    )


def show_answers(result: dict[str, Any]) -> None:
    counts = Counter(result["predictions"])
    listed = ", ".join(f"{counts[name]} {name}" for name in result["classes"] if counts[name])
    typer.echo(f"{len(result['predictions'])} rows by {result['learner']}: {listed}.")
    if "accuracy" in result:
        typer.echo(f"Accuracy {result['accuracy']:.1%}: {result['right']} of {len(result['predictions'])} rows.")
