"""What the experiments that train few-shot learners share: problems, resumable trainings, and evaluation."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

import bilevel
from bilevel.data import ImageDataset
from bilevel.experiments.base import ExperimentSettings, require
from bilevel.experiments.overrides import as_options, as_text
from bilevel.files import read_json, write_bytes, write_json
from bilevel.learners.catalogue.hyper_representation import HyperRepresentation
from bilevel.learners.evaluation import EpisodeScore, evaluate
from bilevel.learners.runs import train_in
from bilevel.learners.settings import TrainingSettings
from bilevel.learners.streams import episodes, open_data
from bilevel.learners.training import FewShotTraining
from bilevel.plotting import Axes
from bilevel.source_commit import commit
from bilevel.training.files import read_tensors, write_tensors
from bilevel.training.folder import RunFolder
from bilevel.training.log import read_metrics
from bilevel.training.stopping import EarlyStopping

# One-shot problems that differ in how long they take: seconds, minutes and hours. Photographs of 84×84 pixels instead
# of 42×42 would take four times as long.
PROBLEMS = {
    "glyphs": TrainingSettings(dataset="glyphs", meta_batch=2),
    "omniglot": TrainingSettings(dataset="omniglot", rotations=True, ways=20, meta_batch=2, inner_lr=1.0),
    "miniimagenet": TrainingSettings(dataset="miniimagenet", network="c4l", image_size=42, meta_batch=4, inner_lr=0.01),
}


@dataclass(frozen=True)
class TrainingCurve:
    """How a finished training went: its accuracies on meta-validation, and where it ended."""

    stopped_early: bool
    iterations: int
    best_iteration: int
    minutes: float
    curve: list[tuple[int, float, float]]

    @property
    def best(self) -> tuple[int, float, float]:
        return next(point for point in self.curve if point[0] == self.best_iteration)


@dataclass(frozen=True)
class FinishedTraining(TrainingCurve):
    """A finished training, and its learner with the best weights."""

    learner: HyperRepresentation
    settings: TrainingSettings


def check_datasets(names: Sequence[str], **per_dataset: Sequence[Any]) -> None:
    """Refuse data sets without a problem in `PROBLEMS`, and settings that do not have one value for each data set."""
    unknown = [name for name in names if name not in PROBLEMS]
    require(
        bool(names) and not unknown,
        f"datasets={','.join(names)} must be some of {', '.join(PROBLEMS)}, separated by commas.",
    )
    for key, values in per_dataset.items():
        require(
            len(values) == len(names) and all(value >= 1 for value in values),
            f"{key}={','.join(map(str, values))} must have one whole number ≥ 1 for each of the {len(names)} data sets "
            f"({', '.join(names)}).",
        )


def open_all(names: Sequence[str]) -> dict[str, ImageDataset]:
    """The data sets. They are opened before any training, so that a missing one is an error at once."""
    return {name: open_data(PROBLEMS[name]) for name in names}


def command_of(name: str, settings: ExperimentSettings) -> str:
    """The command line that has these settings, also if they came from `--quick`."""
    usual, given = type(settings)(), [f.name for f in fields(settings)]
    texts = {name: as_text(getattr(settings, name)) for name in given}
    changed = {name: text for name, text in texts.items() if text != as_text(getattr(usual, name))}
    return " ".join(["bilevel run", name, *as_options(changed)])


def train(
    path: Path,
    settings: TrainingSettings,
    data: ImageDataset,
    command: str,
    progress: bool | None,
    kind: Callable[[TrainingSettings, ImageDataset], FewShotTraining] = FewShotTraining,
) -> FinishedTraining:
    """Train in the folder: resume an unfinished run, only read a finished one. The learner gets its best weights."""
    job = kind(settings, data)
    ending = train_in(path, job, command, path.name, progress)
    job.learner.set_weights(read_tensors(RunFolder(path).best)[0])
    curve, minutes = validations(path)
    assert ending.best_iteration is not None
    stopped = ending.outcome.kind == "stopped early"
    return FinishedTraining(stopped, ending.iteration, ending.best_iteration, minutes, curve, job.learner, settings)


def logged(path: Path, settings: TrainingSettings, data: ImageDataset) -> TrainingCurve | None:
    """The curve of a training that is finished according to its log, if it had these settings and data.

    The log is enough: the weights of a training of which only the curve is shown need not be kept.
    """
    folder = RunFolder(path)
    if not folder.exists():
        return None
    config = folder.config()
    if TrainingSettings.of(config["settings"]) != settings or config["data"]["fingerprint"] != data.fingerprint:
        return None
    curve, minutes = validations(path)
    stopping = EarlyStopping(settings.patience)
    for at, score, _ in curve:
        stopping.update(at, score)
    last = curve[-1][0] if curve else 0
    if not stopping.stop and last < settings.iterations:
        return None
    return TrainingCurve(last < settings.iterations, last, stopping.best_iteration, minutes, curve)


def validations(path: Path) -> tuple[list[tuple[int, float, float]], float]:
    """The accuracies on meta-validation with their hyperiterations and intervals, and the minutes up to the last."""
    points = [line for line in read_metrics(path) if "score" in line]
    curve = [(int(line["iteration"]), line["score"], line["interval"]) for line in points]
    return curve, points[-1]["minutes"] if points else 0.0


def with_schedule(training: TrainingSettings, iterations: int, looks: int, episodes: int) -> TrainingSettings:
    """The training with this number of hyperiterations, about `looks` validations of `episodes`, and no early stop."""
    every = max(1, iterations // looks)
    return replace(
        training,
        iterations=iterations,
        validate_every=every,
        validation_episodes=episodes,
        patience=0,
        checkpoint_every=max(10, every // 2),
    )


def problem_title(training: TrainingSettings) -> str:
    """The data set, ways, shots and network of a training."""
    pixels = f" on {training.image_size}×{training.image_size} pixels" if training.image_size else ""
    return f"{training.dataset} {training.ways}-way {training.shots}-shot, {training.network}{pixels}"


def draw_curve(axes: Axes, curve: Sequence[Sequence[float]], colour: str, label: str, scale: float = 1) -> None:
    """Meta-validation accuracies in per cent over hyperiterations, which are multiplied by `scale`."""
    at, scores = [scale * point[0] for point in curve], [100 * point[1] for point in curve]
    axes.plot(at, scores, color=colour, marker="o", markersize=3, label=label)


@dataclass(frozen=True)
class EvaluatedTraining:
    """Accuracy on meta-test with the step size that was best on meta-validation.

    Attributes:
        inner_lr: the step size.
        validation: the accuracy on meta-validation.
        per_episode: the accuracy in every meta-test episode. All trainings are evaluated on the same episodes.
        of_seeds: the half-width of the 95 % interval that the spread of several seeds gives; 0 for one seed.
    """

    inner_lr: float
    validation: float
    per_episode: tuple[float, ...]
    of_seeds: float = 0.0

    @property
    def accuracy(self) -> float:
        return sum(self.per_episode) / len(self.per_episode)

    @property
    def interval(self) -> float:
        """The half-width of the 95 % interval over episodes and seeds."""
        return math.hypot(half_width(self.per_episode), self.of_seeds)

    def numbers(self) -> dict[str, float]:
        names = "inner_lr", "validation", "accuracy", "interval"
        return {name: getattr(self, name) for name in names}


def evaluate_with_steps(
    trained: FinishedTraining, data: ImageDataset, sizes: Sequence[float], validation_episodes: int, test_episodes: int
) -> EvaluatedTraining:
    """Evaluate after T steps, the T of the training. `step_bound` keeps every step below 1/ν, so that none diverges."""
    learner, steps = trained.learner, trained.settings.steps
    learner.batch_norm = "episode"  # the paper's mode, for all learners
    settings = replace(trained.settings, train_shots=0, outer="query")

    def score(split: str, size: float, count: int) -> EpisodeScore:
        learner.inner_lr = size
        return evaluate(learner, episodes(settings, data, split), count, steps)

    tried = {size: score("val", size, validation_episodes).means[-1] for size in sizes}
    size = max(tried, key=lambda one: tried[one])
    return EvaluatedTraining(size, tried[size], tuple(score("test", size, test_episodes).per_episode[:, -1].tolist()))


def stored(file: Path, of: dict[str, Any]) -> Any:
    """The score in a file, if it is `of` the same settings and data; otherwise None.

    The log and this file are enough: the weights of a training that was evaluated need not be kept.
    """
    if not file.exists():
        return None
    known = read_json(file)
    # Settings that are newer than the file have their defaults.
    settings = json.loads(json.dumps(TrainingSettings.of(known["of"]["settings"]).plain()))
    return known["found"] if {**known["of"], "settings": settings} == of else None


def over_seeds(found: Sequence[EvaluatedTraining]) -> EvaluatedTraining:
    """The mean over trainings from several seeds.

    >>> both = over_seeds([EvaluatedTraining(0.1, 0.5, (0.6, 0.8)), EvaluatedTraining(0.1, 0.5, (0.4, 0.6))])
    >>> round(both.accuracy, 6), round(both.of_seeds, 6)
    (0.6, 0.196)
    """
    count = len(found)
    table = torch.tensor([one.per_episode for one in found], dtype=torch.float64)
    validation = sum(one.validation for one in found) / count
    of_seeds = half_width(table.mean(1).tolist()) if count > 1 else 0.0
    return EvaluatedTraining(found[0].inner_lr, validation, tuple(table.mean(0).tolist()), of_seeds)


def differ(one: EvaluatedTraining, other: EvaluatedTraining) -> tuple[float, float]:
    """The difference of two accuracies, and the half-width of its 95 % interval.

    Both are of the same episodes, so the differences within episodes count: an episode that is hard for one is hard for
    the other.
    """
    gaps = [a - b for a, b in zip(one.per_episode, other.per_episode, strict=True)]
    return sum(gaps) / len(gaps), math.hypot(half_width(gaps), one.of_seeds, other.of_seeds)


def half_width(values: Sequence[float]) -> float:
    """The half-width of the 95 % interval of the mean, 1.96·std/√count."""
    return 1.96 * float(torch.tensor(values, dtype=torch.float64).std()) / math.sqrt(len(values))


@dataclass(frozen=True)
class Learned:
    """A learner after its last hyperiteration, and the lines of its `metrics.jsonl`."""

    learner: HyperRepresentation
    metrics: list[dict[str, float]]

    @property
    def curve(self) -> list[float]:
        """The accuracies on meta-validation, including the one before training."""
        return [line["score"] for line in self.metrics if "score" in line]


def write_run(path: Path, training: TrainingSettings, learned: Learned, steps: int, data: ImageDataset) -> None:
    """Write the folder of a training as `bilevel train` does, with the T that was best on meta-validation, so that
    `bilevel evaluate`, `bilevel classify` and `bilevel report` can use it."""
    folder = RunFolder(path)
    folder.path.mkdir(parents=True, exist_ok=True)
    write_bytes(folder.metrics, "".join(json.dumps(line) + "\n" for line in learned.metrics).encode())
    weights = learned.learner.with_running(learned.learner.lam)
    write_tensors(folder.last, weights, {"iteration": training.iterations})
    config = {
        "preset": None,
        "settings": training.plain(),
        "learner": {**learned.learner.settings(), "steps": steps},
        "data": {"name": data.name, "fingerprint": data.fingerprint, "classes": len(data.classes)},
        "threads": 1,
        "bilevel": bilevel.__version__,
        "commit": commit(),
    }
    write_json(folder.config_file, config)
