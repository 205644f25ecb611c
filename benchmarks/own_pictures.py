"""Which model for which pictures: `python benchmarks/own_pictures.py [--only SET] [--models NAME] [--quick]`.

Evaluates the models of the zoo, used as in `bilevel classify`, and two classifiers of pixels, on letters, digits and
photographs on which no model was trained. Writes PICTURES.md, and pictures.json with every single accuracy. Sets and
models that are not measured keep their earlier figures.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

from bilevel.data.preparation import Preparation
from bilevel.learners import recognition
from bilevel.learners.calibration import calibration_error
from bilevel.learners.library import TrainedLearner, zoo
from picture_sets import PictureSet, sets

# The rate of false alarms that "none of these" is set to.
RATE = 0.05
# The number of episodes: for networks of small pictures, for networks of large pictures, and for calibration.
EPISODES, LARGE, CALIBRATED = 100, 40, 30
# The goals: the least accuracy of the default model in per cent, by set.
GOALS = {"digits, mixed sizes and polarities": 86.0, "letters in a corner": 80.0, "letters in a shadow": 80.0}
# The sets on which probabilities are evaluated, and the numbers of classes. Pictures of as many other classes, if the
# set has them, are "strangers": they belong to none of the classes of the episode.
CALIBRATED_WAYS = {
    "letters, 28 pixels": (20,),
    "letters, original files": (20,),
    "digits, mixed sizes and polarities": (10, 5),
    "photographs, 1 of each class": (5,),
    "photographs, 5 of each class": (5,),
}
# By set and contestant: accuracies, seconds, and the results of `probabilities` by number of classes.
Figures = dict[str, dict[str, dict[str, Any]]]
Adapt = Callable[[np.ndarray, np.ndarray], Callable[[np.ndarray], np.ndarray]]


@dataclass(frozen=True)
class Contestant:
    """A classifier: its name, how pictures are prepared for it, and how it learns from labelled pictures."""

    name: str
    preparation: Preparation
    adapt: Adapt
    episodes: int = EPISODES


@dataclass(frozen=True)
class Episode:
    """The positions of the support pictures, of the queries and of strangers, and the classes 0, 1, … of the first two.

    Strangers are pictures of other classes.
    """

    support: np.ndarray
    labels: np.ndarray
    queries: np.ndarray
    answers: np.ndarray
    strangers: np.ndarray


def episodes(task: PictureSet, labels: np.ndarray, count: int) -> Iterator[Episode]:
    """The episodes, the same for every contestant."""
    classes = np.unique(labels)
    for number in range(count):
        draw = np.random.default_rng([3, number])
        chosen = draw.permutation(classes)
        known, others = chosen[: task.ways], chosen[task.ways : 2 * task.ways]
        rows = np.stack([draw.permutation(np.flatnonzero(labels == c))[: task.shots + task.queries] for c in known])
        strange = [draw.permutation(np.flatnonzero(labels == c))[: task.queries] for c in others]
        each = np.arange(task.ways)
        yield Episode(
            rows[:, : task.shots].reshape(-1),
            each.repeat(task.shots),
            rows[:, task.shots :].reshape(-1),
            each.repeat(task.queries),
            np.concatenate(strange) if strange else np.zeros(0, int),
        )


class Prepared:
    """The prepared pictures of a set. Each preparation is done once."""

    def __init__(self, task: PictureSet) -> None:
        self.task = task
        self.labels = np.array([label for label, _ in task.pictures()])
        self.made: dict[Preparation, np.ndarray] = {}

    def images(self, how: Preparation) -> np.ndarray:
        if how not in self.made:
            self.made[how] = np.stack([how(picture).image for _, picture in self.task.pictures()])
        return self.made[how]


def network(model: TrainedLearner) -> Adapt:
    def adapt(images: np.ndarray, labels: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        classifier = recognition.adapted(model, images, [str(label) for label in labels])
        return lambda queries: classifier.predict_proba(queries).numpy()

    return adapt


def pixels(make: Callable[[], object]) -> Adapt:
    def adapt(images: np.ndarray, labels: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        fitted = make().fit(_flat(images), labels)  # type: ignore[attr-defined]
        return lambda queries: fitted.predict_proba(_flat(queries))

    return adapt


def _flat(images: np.ndarray) -> np.ndarray:
    return images.reshape(len(images), -1) / 255.0


def models() -> dict[str, TrainedLearner]:
    return {f"zoo:{name}": recognition.trained(f"zoo:{name}", None) for name in zoo()}


def contestants(found: dict[str, TrainedLearner], drawn: bool) -> list[Contestant]:
    how = Preparation("drawing", 1, 28, 28) if drawn else Preparation("photograph", 3, 32, 32)
    simple = {
        "nearest neighbour on pixels": partial(KNeighborsClassifier, 1),
        "logistic regression on pixels": partial(LogisticRegression, max_iter=300),
    }
    return [
        *(
            Contestant(name, model.preparation, network(model), _episodes(model, drawn))
            for name, model in found.items()
        ),
        *(Contestant(name, how, pixels(make)) for name, make in simple.items()),
    ]


def _episodes(model: TrainedLearner, drawn: bool) -> int:
    """The number of episodes: fewer for slow networks of large pictures, and fewest if these are given drawings."""
    return EPISODES if model.learner.shape[1] <= 28 else LARGE // 2 if drawn else LARGE


def accuracies(one: Contestant, data: Prepared, count: int) -> np.ndarray:
    images, found = data.images(one.preparation), []
    for episode in episodes(data.task, data.labels, count):
        predicted = one.adapt(images[episode.support], episode.labels)(images[episode.queries]).argmax(1)
        found.append(float((predicted == episode.answers).mean()))
    return 100 * np.array(found)


def interval(values: np.ndarray) -> float:
    return float(1.96 * values.std(ddof=1) / len(values) ** 0.5)


def shown(values: np.ndarray) -> str:
    return f"{values.mean():.1f} ± {interval(values):.1f}"


def probabilities(model: TrainedLearner, data: Prepared, ways: int, count: int) -> list[str]:
    """Calibration errors without and with the card's temperature, the rate of false alarms and of found strangers."""
    images, task = data.images(model.preparation), replace(data.task, ways=ways)
    before, after, answers, alarms, found = [], [], [], [], []
    for episode in episodes(task, data.labels, count):
        labels = [str(label) for label in episode.labels]
        classifier = recognition.adapted(model, images[episode.support], labels)
        scores = classifier.scores(images[episode.queries])
        before.append(scores.softmax(1))
        after.append((scores / classifier.temperature).softmax(1))
        answers.append(torch.from_numpy(episode.answers))
        none = recognition.none_of_these(model, classifier, RATE)
        alarms += none(images[episode.queries])
        if len(episode.strangers):
            found += none(images[episode.strangers])
    truth = torch.cat(answers)
    errors = [f"{100 * calibration_error(torch.cat(part), truth):.1f}" for part in (before, after)]
    return [*errors, f"{100 * np.mean(alarms):.1f}", f"{100 * np.mean(found):.1f}" if found else "–"]


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    align = ["---", *["---:"] * (len(head) - 1)]
    return [f"| {' | '.join(row)} |" for row in (head, align, *rows)]


def chosen_for(task: PictureSet) -> str:
    """The model that `bilevel classify` uses by default."""
    return recognition.choose(int(task.drawn), 1, task.ways, task.shots).spec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--only", default="", help="measure sets whose name contains this")
    parser.add_argument("--models", default="", help="measure models whose name contains this")
    parser.add_argument("--quick", action="store_true", help="measure a few episodes of the first set only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    file, found = options.out / "pictures.json", models()
    figures = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for task in sets()[:1] if options.quick else sets():
        if options.only in task.name:
            measure(task, found, options.models, 0.02 if options.quick else 1.0, figures)
            file.write_text(json.dumps(figures), encoding="utf-8")
    text = written(figures)
    (options.out / "PICTURES.md").write_text(text, encoding="utf-8")
    print(text)


def measure(task: PictureSet, found: dict[str, TrainedLearner], chosen: str, scale: float, figures: Figures) -> None:
    """Measure the contestants whose name contains `chosen` on one set, and add the results to the figures."""
    data = Prepared(task)
    here = figures.setdefault(task.name, {})
    for one in contestants(found, task.drawn):
        if chosen not in one.name:
            continue
        began = time.process_time()
        values = accuracies(one, data, max(2, int(scale * one.episodes)))
        here[one.name] = {"accuracies": [round(float(value), 3) for value in values]}
        model = found.get(one.name)
        if model is not None and model.preparation.draws == task.drawn and _evaluates_probabilities(one.name, task):
            count = max(2, int(scale * CALIBRATED))
            here[one.name]["probabilities"] = {
                str(ways): probabilities(model, data, ways, count) for ways in CALIBRATED_WAYS.get(task.name, ())
            }
        here[one.name]["seconds"] = round(time.process_time() - began, 1)
        print(f"{task.name}: {one.name} {shown(values)}", flush=True)


def written(figures: Figures) -> str:
    lines = ["# Which model for which pictures", ""]
    tasks = [task for task in sets() if task.name in figures]
    rows = {task.name: {name: np.array(of["accuracies"]) for name, of in figures[task.name].items()} for task in tasks}
    for drawn, title in ((True, "Drawings"), (False, "Photographs")):
        some = [task for task in tasks if task.drawn == drawn]
        if not some:
            continue
        lines += [
            f"## {title}",
            "",
            "Accuracy in per cent with its 95 % interval. Bold: the model that `bilevel classify` uses by default.",
            "",
        ]
        head = ["", *(f"{task.name}, {task.ways}-way {task.shots}-shot" for task in some)]
        # Models before classifiers of pixels, in alphabetical order.
        names = sorted({name for task in some for name in rows[task.name]}, key=lambda name: (" " in name, name))
        body = [
            [name if " " in name else f"`{name}`", *(_cell(name, rows[task.name].get(name), task) for task in some)]
            for name in names
        ]
        lines += [*table(head, body), ""]
    lines += ["## Goals", "", *table(["goal", "at least", "measured"], goals(rows)), ""]
    head = ["pictures", "model", "calibration error, τ = 1", "with the card's τ", "false alarms", "strangers found"]
    lines += ["## Probabilities", "", "Figures in per cent.", "", *table(head, _probabilities(figures, tasks)), ""]
    minutes = sum(of["seconds"] for each in figures.values() for of in each.values()) / 60
    return "\n".join(
        [*lines, f"Measured by `python benchmarks/own_pictures.py` in {minutes:.0f} minutes of processor time.", ""]
    )


def _evaluates_probabilities(name: str, task: PictureSet) -> bool:
    """True for the default model of `bilevel classify`, and on photographs for all models."""
    return name == chosen_for(task) or not task.drawn


def _probabilities(figures: Figures, tasks: list[PictureSet]) -> list[list[str]]:
    return [
        [f"{task.name}, {ways}-way {task.shots}-shot", f"`{name}`", *row]
        for task in tasks
        for name, of in figures[task.name].items()
        for ways, row in of.get("probabilities", {}).items()
        if _evaluates_probabilities(name, task)
    ]


def _cell(name: str, values: np.ndarray | None, task: PictureSet) -> str:
    if values is None:
        return "–"
    return f"**{shown(values)}**" if name == chosen_for(task) else shown(values)


def goals(rows: dict[str, dict[str, np.ndarray]]) -> list[list[str]]:
    found = []
    for task in sets():
        if task.name in rows and task.name in GOALS:
            found.append([task.name, f"{GOALS[task.name]:g}", shown(rows[task.name][chosen_for(task)])])
    small, full = (rows.get(name) for name in ("letters, 28 pixels", "letters, original files"))
    if small and full:
        name = chosen_for(sets()[0])
        found.append(["letters, original files − 28 pixels, same episodes", "−0.5", shown(full[name] - small[name])])
    return found


if __name__ == "__main__":
    main()
