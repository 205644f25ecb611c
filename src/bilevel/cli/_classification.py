"""What `bilevel classify` does. Kept in its own module so that `--help` does not import torch."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from bilevel.learners import choice, library
from bilevel.learners.classifier import FewShotClassifier
from bilevel.learners.recognition import NONE, adapted, facts_to_keep, kept_classifier, none_of_these, trained
from bilevel.models.batch_norm import MEANING

# Pictures that are looked at to tell drawings from photographs.
LOOKED_AT = 60


@dataclass(frozen=True)
class Classification:
    """The answer, with everything it depended on.

    Args:
        model: where the representation came from.
        classifier: it, adapted to the support pictures.
        preparation: how the pictures became what the model takes.
        classes: the class folders, sorted.
        support: the labelled pictures, class after class.
        query: the new ones.
        probabilities: queries × classes.
        truth: the class of every query whose folder names it.
        notes: what was done to the pictures on the way in, one sentence each.
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
        """The classes of a query by falling probability."""
        row = self.probabilities[index].tolist()
        return sorted(zip(self.classes, row, strict=True), key=lambda pair: -pair[1])

    @property
    def steps(self) -> str:
        """T, where the learner takes inner steps, as the end of a sentence."""
        return f", T = {self.classifier.steps}" if self.classifier.learner.has_steps else ""

    @property
    def predictions(self) -> list[str]:
        return [NONE if none else self.ranked(i)[0][0] for i, none in enumerate(self.none)]

    def save(self, path: Path) -> None:
        """Write the classifier with its labelled pictures, so that it can be used without them."""
        self.classifier.save(path, facts_to_keep(self.model, self.preparation))

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
        """One line per query: the prediction, and the probability of every class."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["picture", "truth", "prediction", "probability", *(f"p({name})" for name in self.classes)])
        for line in self.plain()["predictions"]:
            rest = [f"{line['probabilities'][name]:.6f}" for name in self.classes]
            texts = [_as_text(text) for text in (line["picture"], line["truth"] or "", line["prediction"])]
            writer.writerow([*texts, f"{line['probability']:.6f}", *rest])
        write_bytes(path, text.getvalue().encode())


def _as_text(name: str) -> str:
    """A name that spreadsheets do not take for a formula: an apostrophe before the signs that begin one."""
    return f"'{name}" if name.startswith(("=", "+", "-", "@", "\t", "\r")) else name


@dataclass(frozen=True)
class ClassifyOptions:
    """The options of `bilevel classify` that change an answer.

    Args:
        batch_norm: a mode, or None for the one in which a query stands for itself.
        steps: T, or None for the model's own.
        invert: whether to swap light and dark; None finds out, for models of drawings.
        clean: whether to even out the paper of drawings and to crop them to their ink.
        strict: whether an unreadable picture is an error; otherwise it is left out.
        none: the false-alarm rate of "none of these"; None: never say it.
        threads: torch's.
    """

    batch_norm: str | None = None
    steps: int | None = None
    invert: bool | None = None
    clean: bool = True
    strict: bool = False
    none: float | None = None
    threads: int | None = None


def classify(
    spec: str | None, support: Path | None, query: Path, options: ClassifyOptions, outputs: Sequence[Path | None] = ()
) -> Classification:
    """Adapt the model to the support folder and ask it about the query pictures.

    Args:
        spec: as for `library.find`, or a classifier that was saved; None chooses a model of the zoo.
        support: a folder of class folders; None for a classifier that was saved.
        query: a folder or a picture.
        options: how.
        outputs: files that will be written, which must not be among the pictures.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    kept = None if spec is None or support is not None else kept_classifier(spec)
    if support is None and kept is None:
        raise BilevelError(
            "--support is missing: a folder with one folder of labelled pictures per class. Only a classifier that "
            "`bilevel classify … --save my.safetensors` wrote needs none."
        )
    found = _user_pictures.find(support, query, () if kept is None else [str(name) for name in kept[1].classes])
    taken = {file.resolve() for file in found.everything()}
    for file in outputs:
        if file is not None and file.resolve() in taken:
            raise BilevelError(f"{file} is one of the pictures to be read; write the result somewhere else.")
    notes = []
    if kept is not None:
        refused = [name for name in ("batch_norm", "steps") if getattr(options, name) is not None]
        if refused:
            raise BilevelError(f"{spec} was adapted already; leave --{refused[0].replace('_', '-')} out.")
        model, classifier = kept
        preparation = model.preparation
        options = replace(options, clean=preparation.clean, invert=preparation.invert)
    else:
        if spec is None:
            chosen = _chosen(found)
            spec = chosen.spec
            notes.append(f"No model was named. {chosen.why}")
        model, classifier = trained(spec, options.batch_norm), None
        preparation = replace(model.preparation, clean=options.clean, invert=options.invert)
        if not model.knows_preparation:
            preparation, why = _guessed(preparation, found)
            notes.append(f"{spec} does not say how its pictures are prepared. {why}")
    found, labelled, asked, more = _user_pictures.read(found, preparation, options.strict)
    if classifier is None:
        classifier = adapted(model, labelled.images, found.labels(), options.steps)
    scores = classifier.scores(asked.images)
    none = [False] * len(scores)
    if options.none is not None:
        threshold = none_of_these(model, classifier, options.none)
        none = threshold(scores)
        notes.append(threshold.why)
    notes += more
    probabilities = (scores / classifier.temperature).softmax(1)
    return Classification(
        model, classifier, preparation, found.classes, labelled, asked, probabilities, found.truth, notes, none
    )


def _chosen(found: _user_pictures.PictureFiles) -> choice.Choice:
    """A model for these pictures."""
    labelled = [len(files) for files in found.classes.values()]
    return choice.choose(*_drawn(found), len(labelled), sum(labelled) / len(labelled))


def _guessed(usual: Preparation, found: _user_pictures.PictureFiles) -> tuple[Preparation, str]:
    """How pictures are prepared for a model that does not say it, and why, as a sentence."""
    drawn, looked_at = _drawn(found)
    kind: Kind = "drawing" if usual.channels == 1 and 2 * drawn > looked_at else "photograph"
    return replace(usual, kind=kind), (
        f"{drawn} of {looked_at} pictures look like drawings, and the model takes {usual.channels} channels, so they "
        f"are prepared as {kind}s. Before you save a learner, set learner.preparation to that of its data."
    )


def _drawn(found: _user_pictures.PictureFiles) -> tuple[int, int]:
    """How many of some of the pictures look like drawings, and of how many; unreadable ones have no say."""
    files = found.everything()
    seen = [_user_pictures.looks_drawn(file) for file in files[:: max(1, len(files) // LOOKED_AT)]]
    known = [one for one in seen if one is not None]
    return sum(known), len(known)


def show(result: Classification, top: int) -> None:
    """The same for people: a table, and what it rests on."""
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
            said = result.predictions[index]
            cells.append("" if true is None else "right" if true == said else f"wrong: {true}")
        table.add_row(*map(Text, cells))
    console(140).print(table)
    for line in summary(result):
        typer.echo(line)


def summary(result: Classification) -> list[str]:
    """What was found, what it rests on, and what was done to the pictures."""
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
