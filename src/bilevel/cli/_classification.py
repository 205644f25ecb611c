"""What `bilevel classify` does; apart, because it needs torch."""

from __future__ import annotations

import csv
import io
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor

from bilevel.cli import _user_pictures
from bilevel.cli._user_pictures import Pictures
from bilevel.errors import BilevelError
from bilevel.meta import library
from bilevel.meta.classifier import FewShotClassifier
from bilevel.models.batch_norm import MEANING, MODES
from bilevel.training.files import write_bytes

# Data sets whose pictures are light ink on black, where a scan is dark ink on white.
INK = ("glyphs", "mnist", "omniglot")


@dataclass(frozen=True)
class Classification:
    """The answer, with everything it depended on.

    Args:
        model: where the representation came from.
        classifier: it, adapted to the support pictures.
        classes: the class folders, sorted.
        support: the labelled pictures, class after class.
        query: the new ones.
        probabilities: queries × classes.
        truth: the class of every query whose folder names it.
        notes: what was done to the pictures on the way in, one sentence each.
    """

    model: library.Trained
    classifier: FewShotClassifier
    classes: dict[str, list[Path]]
    support: Pictures
    query: Pictures
    probabilities: Tensor
    truth: list[str | None]
    notes: list[str]

    def ranked(self, index: int) -> list[tuple[str, float]]:
        """The classes of a query by falling probability."""
        row = self.probabilities[index].tolist()
        return sorted(zip(self.classes, row, strict=True), key=lambda pair: -pair[1])

    @property
    def predictions(self) -> list[str]:
        return [self.ranked(i)[0][0] for i in range(len(self.truth))]

    def accuracy(self) -> dict[str, Any] | None:
        """How many of the queries with a known class were right; None if there are none."""
        pairs = [(said, true) for said, true in zip(self.predictions, self.truth, strict=True) if true is not None]
        right = sum(said == true for said, true in pairs)
        return {"right": right, "of": len(pairs), "accuracy": right / len(pairs)} if pairs else None

    def plain(self) -> dict[str, Any]:
        """All of it in JSON's types."""
        settings, learner = self.model.settings, self.classifier.learner
        queries = []
        for index, (name, true) in enumerate(zip(self.query.names, self.truth, strict=True)):
            ranked = self.ranked(index)
            line = {"picture": name, "prediction": ranked[0][0], "probability": ranked[0][1]}
            queries.append({**line, "truth": true, "probabilities": dict(ranked)})
        return {
            "model": self.model.name,
            "trained_on": {"data": settings.dataset, "ways": settings.ways, "shots": settings.shots},
            "classes": {name: len(files) for name, files in self.classes.items()},
            "steps": self.classifier.steps,
            "inner_lr": learner.inner_lr,
            "batch_norm": learner.batch_norm,
            "batch_norm_meaning": MEANING[learner.batch_norm],
            "notes": self.notes,
            "accuracy": self.accuracy(),
            "predictions": queries,
        }

    def write_csv(self, path: Path) -> None:
        """One line per query: the prediction, and the probability of every class."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["picture", "truth", "prediction", "probability", *(f"p({name})" for name in self.classes)])
        for line in self.plain()["predictions"]:
            rest = [f"{line['probabilities'][name]:.6f}" for name in self.classes]
            head = [line["picture"], line["truth"] or "", line["prediction"], f"{line['probability']:.6f}"]
            writer.writerow([*head, *rest])
        write_bytes(path, text.getvalue().encode())


def classify(
    spec: str,
    support: Path,
    query: Path,
    *,
    batch_norm: str | None,
    steps: int | None,
    invert: bool | None,
    threads: int | None = None,
    outputs: Sequence[Path | None] = (),
) -> Classification:
    """Adapt the model to the support folder and ask it about the query pictures.

    Args:
        spec: as for `library.find`.
        support: a folder of class folders.
        query: a folder or a picture.
        batch_norm: a mode, or None for the one in which a query stands for itself.
        steps: T, or None for the model's own.
        invert: whether to swap light and dark; None decides by the pictures' borders, for models of ink.
        threads: torch's.
        outputs: files that will be written, which must not be among the pictures.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    model = _model(spec, batch_norm)
    found = _user_pictures.find(support, query)
    taken = {file.resolve() for file in found.everything()}
    for file in outputs:
        if file is not None and file.resolve() in taken:
            raise BilevelError(f"{file} is one of the pictures to be read; write the result somewhere else.")
    read = _user_pictures.read(found, model.learner.shape, model.settings.dataset in INK, invert)
    labels = [name for name, files in found.classes.items() for _ in files]
    classifier = model.learner.adapt(read.support.images, labels, steps)
    probabilities = classifier.predict_proba(read.query.images)
    return Classification(
        model, classifier, found.classes, read.support, read.query, probabilities, found.truth, read.notes
    )


def _model(spec: str, batch_norm: str | None) -> library.Trained:
    if batch_norm is not None and batch_norm not in MODES:
        raise BilevelError(f"--batch-norm {batch_norm} is unknown; write one of {', '.join(MODES)}.")
    try:
        found = library.find(spec, batch_norm)
        if batch_norm is None and found.settings.batch_norm == "episode":
            found = library.find(spec, "support")
    except (KeyError, TypeError) as error:
        raise BilevelError(
            f"The description of {spec} is incomplete: {error}. Train it again, or use another."
        ) from error
    return found


def show(result: Classification, top: int) -> None:
    """The same for people: a table, and what it rests on."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # A pipe has no width of its own; a name that does not fit is folded rather than cut.
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    known = any(result.truth)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("picture", overflow="fold")
    for rank in range(min(top, len(result.classes))):
        table.add_column(("prediction", "runner-up")[rank] if rank < 2 else f"no. {rank + 1}", overflow="fold")
        table.add_column("probability" if rank == 0 else "", justify="right")
    if known:
        table.add_column("truth", overflow="fold")
    for index, (name, true) in enumerate(zip(result.query.names, result.truth, strict=True)):
        ranked = result.ranked(index)[:top]
        cells = [name, *(cell for label, p in ranked for cell in (label, f"{p:.1%}"))]
        if known:
            cells.append("" if true is None else "right" if true == ranked[0][0] else f"wrong: {true}")
        table.add_row(*map(Text, cells))
    console.print(table)
    for line in summary(result):
        typer.echo(line)


def summary(result: Classification) -> list[str]:
    """What was found, what it rests on, and what was done to the pictures."""
    settings, learner, predictions = result.model.settings, result.classifier.learner, result.predictions
    counts = Counter(predictions)
    listed = ", ".join(f"{counts[name]} {name}" for name in result.classes if counts[name])
    unsure = sum(float(row.max()) < 0.5 for row in result.probabilities)
    lines = [f"{_pictures(len(predictions))}: {listed}." + (f" {unsure} with less than 50 %." if unsure else "")]
    if (score := result.accuracy()) is not None:
        some = "" if score["of"] == len(predictions) else " whose folder names a class"
        lines.append(f"Accuracy {score['accuracy']:.1%}: {score['right']} of {_pictures(score['of'])}{some}.")
    shots = sorted({len(files) for files in result.classes.values()})
    each = f"{shots[0]}" if len(shots) == 1 else f"{shots[0]}–{shots[-1]}"
    lines.append(
        f"Learned from {each} labelled pictures in each of {len(result.classes)} classes with {result.model.name} "
        f"(trained on {settings.dataset}, {settings.ways}-way {settings.shots}-shot), T = {result.classifier.steps}."
    )
    lines.append(f"Batch norm: {learner.batch_norm}, {MEANING[learner.batch_norm]}.")
    return lines + result.notes


def _pictures(count: int) -> str:
    return "1 picture" if count == 1 else f"{count} pictures"
