"""The work of `bilevel classify`. Kept in its own module so that `--help` does not import torch."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor

from bilevel.cli import _user_pictures
from bilevel.cli._output import console
from bilevel.cli._user_pictures import Pictures
from bilevel.data.preparation import Kind, Preparation
from bilevel.errors import BilevelError
from bilevel.files import write_bytes
from bilevel.learners import library
from bilevel.learners.classifier import FewShotClassifier
from bilevel.learners.recognition import (
    NONE,
    ModelChoice,
    adapted,
    choose,
    facts_to_save,
    none_of_these,
    saved_classifier,
    trained,
)
from bilevel.models.batch_norm import MEANING

# About how many pictures are examined to distinguish drawings from photographs.
EXAMINED = 60


@dataclass(frozen=True)
class Classification:
    """The predictions, and everything that they depend on.

    Args:
        model: the trained model.
        classifier: the model, adapted to the labelled pictures.
        preparation: how the pictures were converted to inputs of the model.
        classes: the files of every class, by the name of the class.
        support: the labelled pictures, class after class.
        query: the new pictures.
        probabilities: queries × classes.
        truth: the class of every query, if its folder is named like a class; else None.
        notes: sentences about the choice of the model and the conversion of the pictures.
        none: which queries are "none of these".
    """

    model: library.TrainedLearner
    classifier: FewShotClassifier
    preparation: Preparation
    classes: dict[str, list[Path]]
    support: Pictures
    query: Pictures
    probabilities: Tensor
    truth: list[str | None]
    notes: list[str]
    none: list[bool]

    def ranked(self, index: int) -> list[tuple[str, float]]:
        """The classes of a query with their probabilities, largest first."""
        row = self.probabilities[index].tolist()
        return sorted(zip(self.classes, row, strict=True), key=lambda pair: -pair[1])

    @property
    def steps(self) -> str:
        """T, if the learner has inner steps, as the end of a sentence."""
        return f", T = {self.classifier.steps}" if self.classifier.learner.has_steps else ""

    @cached_property
    def predictions(self) -> list[str]:
        return [NONE if none else self.ranked(i)[0][0] for i, none in enumerate(self.none)]

    def save(self, path: Path) -> None:
        """Write the classifier to a file that includes the labelled pictures."""
        self.classifier.save(path, facts_to_save(self.model, self.preparation))

    def accuracy(self) -> dict[str, Any] | None:
        """The accuracy on the queries whose class is known; None if there are none."""
        pairs = [(answer, true) for answer, true in zip(self.predictions, self.truth, strict=True) if true is not None]
        right = sum(answer == true for answer, true in pairs)
        return {"right": right, "of": len(pairs), "accuracy": right / len(pairs)} if pairs else None

    def plain(self) -> dict[str, Any]:
        """The result as JSON types."""
        settings, learner = self.model.settings, self.classifier.learner
        queries = []
        for index, (name, true) in enumerate(zip(self.query.names, self.truth, strict=True)):
            ranked = self.ranked(index)
            line = {"picture": name, "prediction": self.predictions[index], "probability": ranked[0][1]}
            queries.append({**line, "truth": true, "probabilities": dict(ranked)})
        return {
            "model": self.model.name,
            "trained_on": {"data": settings.dataset, "ways": settings.ways, "shots": settings.shots},
            "classes": {name: len(files) for name, files in self.classes.items()},
            "learner": learner.name,
            "steps": self.classifier.steps if learner.has_steps else None,
            "inner_lr": getattr(learner.options, "inner_lr", None),
            "batch_norm": learner.batch_norm if learner.has_batch_norm else None,
            "batch_norm_meaning": MEANING[learner.batch_norm] if learner.has_batch_norm else None,
            "preparation": self.preparation.plain(),
            "temperature": self.classifier.temperature,
            "notes": self.notes,
            "accuracy": self.accuracy(),
            "predictions": queries,
        }

    def write_csv(self, path: Path) -> None:
        """Write one line per query: the prediction, and the probability of every class."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["picture", "truth", "prediction", "probability", *(f"p({name})" for name in self.classes)])
        for line in self.plain()["predictions"]:
            rest = [f"{line['probabilities'][name]:.6f}" for name in self.classes]
            texts = [_as_text(text) for text in (line["picture"], line["truth"] or "", line["prediction"])]
            writer.writerow([*texts, f"{line['probability']:.6f}", *rest])
        write_bytes(path, text.getvalue().encode())


def _as_text(name: str) -> str:
    """The name as a cell of a spreadsheet: an apostrophe before signs that would begin a formula."""
    return f"'{name}" if name.startswith(("=", "+", "-", "@", "\t", "\r")) else name


@dataclass(frozen=True)
class ClassifyOptions:
    """The options of `bilevel classify` that affect the predictions.

    Args:
        batch_norm: a batch norm mode; None: one in which predictions are independent.
        steps: T; None: the model's own.
        invert: whether to swap light and dark; None: decide for each picture, if the model is for drawings.
        clean: whether to even out the paper of drawings and to crop them to their ink.
        strict: whether an unreadable picture is an error; if not, it is left out.
        none: the false-alarm rate of "none of these"; None: never predict it.
    """

    batch_norm: str | None = None
    steps: int | None = None
    invert: bool | None = None
    clean: bool = True
    strict: bool = False
    none: float | None = None


def classify(
    spec: str | None, support: Path | None, query: Path, options: ClassifyOptions, outputs: Sequence[Path | None] = ()
) -> Classification:
    """Adapt the model to the support folder, and classify the query pictures.

    Args:
        spec: as for `library.find`, or a saved classifier; None: a model of the zoo is chosen.
        support: a folder with one folder of pictures per class; None for a saved classifier.
        query: a folder or a picture.
        options: the options that affect the predictions.
        outputs: files that will be written. They must not be among the pictures.
    """
    saved = None if spec is None or support is not None else saved_classifier(spec)
    if support is None and saved is None:
        raise BilevelError(
            "--support is missing: pass a folder with one folder of labelled pictures per class. Only a classifier "
            "that `bilevel classify … --save my.safetensors` wrote needs none."
        )
    files = _user_pictures.find(support, query, () if saved is None else [str(name) for name in saved[1].classes])
    inputs = {file.resolve() for file in files.everything()}
    for file in outputs:
        if file is not None and file.resolve() in inputs:
            raise BilevelError(f"{file} is one of the pictures to be read. Write the result to another file.")
    notes = []
    if saved is not None:
        refused = [name for name in ("batch_norm", "steps") if getattr(options, name) is not None]
        if refused:
            raise BilevelError(
                f"{spec} is a saved classifier, which is adapted already. Leave --{refused[0].replace('_', '-')} out."
            )
        model, classifier = saved
        preparation = model.preparation
        options = replace(options, clean=preparation.clean, invert=preparation.invert)
    else:
        if spec is None:
            chosen = _chosen(files)
            spec = chosen.spec
            notes.append(f"No model was named. {chosen.why}")
        model, classifier = trained(spec, options.batch_norm), None
        preparation = replace(model.preparation, clean=options.clean, invert=options.invert)
        if not model.knows_preparation:
            preparation, why = _guessed(preparation, files)
            notes.append(f"{spec} does not say how its pictures are prepared. {why}")
    files, labelled, new, reading_notes = _user_pictures.read(files, preparation, options.strict)
    if classifier is None:
        classifier = adapted(model, labelled.images, files.labels(), options.steps)
    scores = classifier.scores(new.images)
    none = [False] * len(scores)
    if options.none is not None:
        threshold = none_of_these(model, classifier, options.none)
        none = threshold(new.images)
        notes.append(threshold.why)
    notes += reading_notes
    probabilities = (scores / classifier.temperature).softmax(1)
    return Classification(
        model, classifier, preparation, files.classes, labelled, new, probabilities, files.truth, notes, none
    )


def _chosen(files: _user_pictures.PictureFiles) -> ModelChoice:
    """The model of the zoo for these pictures."""
    labelled = [len(of_class) for of_class in files.classes.values()]
    return choose(*_drawn(files), len(labelled), sum(labelled) / len(labelled))


def _guessed(default: Preparation, files: _user_pictures.PictureFiles) -> tuple[Preparation, str]:
    """How pictures are prepared for a model whose card does not say it, and a sentence that says why."""
    drawn, examined = _drawn(files)
    kind: Kind = "drawing" if default.channels == 1 and 2 * drawn > examined else "photograph"
    return replace(default, kind=kind), (
        f"{drawn} of {examined} pictures look like drawings, and the model takes {default.channels} channels, so they "
        f"are prepared as {kind}s. Before you save a learner, set learner.preparation to that of its data."
    )


def _drawn(files: _user_pictures.PictureFiles) -> tuple[int, int]:
    """In a sample of the labelled pictures: how many look like drawings, and how many could be read.

    The queries do not count, because they may be of none of the classes.
    """
    labelled = [file for of_class in files.classes.values() for file in of_class]
    drawn = [_user_pictures.looks_drawn(file) for file in labelled[:: max(1, len(labelled) // EXAMINED)]]
    readable = [answer for answer in drawn if answer is not None]
    return sum(readable), len(readable)


def show(result: Classification, top: int) -> None:
    """Print a table of the predictions, and the summary."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

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
        if result.none[index]:
            cells[1:3] = [NONE, ""]
        if known:
            prediction = result.predictions[index]
            cells.append("" if true is None else "right" if true == prediction else f"wrong: {true}")
        table.add_row(*map(Text, cells))
    console(140).print(table)
    for line in summary(result):
        typer.echo(line)


def summary(result: Classification) -> list[str]:
    """Lines about the predictions, the model, and the conversion of the pictures."""
    settings, learner, predictions = result.model.settings, result.classifier.learner, result.predictions
    counts = Counter(predictions)
    listed = ", ".join(f"{counts[name]} {name}" for name in [*result.classes, NONE] if counts[name])
    unsure = sum(float(row.max()) < 0.5 for row in result.probabilities)
    lines = [f"{_pictures(len(predictions))}: {listed}." + (f" {unsure} with less than 50 %." if unsure else "")]
    if (score := result.accuracy()) is not None:
        some = "" if score["of"] == len(predictions) else " whose folder names a class"
        lines.append(f"Accuracy {score['accuracy']:.1%}: {score['right']} of {_pictures(score['of'])}{some}.")
    shots = sorted(set(torch.bincount(result.classifier.numbers).tolist()))
    each = f"{shots[0]}" if len(shots) == 1 else f"{shots[0]}–{shots[-1]}"
    lines.append(
        f"Learned from {each} labelled pictures in each of {len(result.classes)} classes with {result.model.name} "
        f"(trained on {settings.dataset}, {settings.ways}-way {settings.shots}-shot){result.steps}."
    )
    if result.classifier.temperature != 1:
        lines.append(f"Probabilities are calibrated: temperature {result.classifier.temperature:.3g}, from the card.")
    if learner.has_batch_norm:
        lines.append(f"Batch norm: {learner.batch_norm}, {MEANING[learner.batch_norm]}.")
    return lines + result.notes


def _pictures(count: int) -> str:
    return "1 picture" if count == 1 else f"{count} pictures"
