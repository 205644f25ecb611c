"""What the experiments that train few-shot learners share: their problems, resumable trainings, and judging."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from bilevel.data import ImageDataset
from bilevel.experiments.base import require
from bilevel.experiments.overrides import as_options, as_text
from bilevel.meta.evaluation import Score, judge
from bilevel.meta.hyper_representation import HyperRepresentation
from bilevel.meta.runs import train_in
from bilevel.meta.settings import Settings as Training
from bilevel.meta.training import FewShotTraining, episodes, open_data
from bilevel.training.files import read_tensors
from bilevel.training.folder import RunFolder, read_metrics

# One-shot problems that differ in how long they take: seconds, minutes and hours. Photographs of 84×84 pixels instead
# of 42×42 would take four times as long.
PROBLEMS = {
    "glyphs": Training(dataset="glyphs", meta_batch=2),
    "omniglot": Training(dataset="omniglot", rotations=True, ways=20, meta_batch=2, inner_lr=1.0),
    "miniimagenet": Training(dataset="miniimagenet", network="c4l", image_size=42, meta_batch=4, inner_lr=0.01),
}


@dataclass(frozen=True)
class Trained:
    """A training that ran to its end, and what it left: accuracies on meta-validation along the way."""

    learner: HyperRepresentation
    settings: Training
    stopped_early: bool
    iterations: int
    best_iteration: int
    minutes: float
    curve: list[tuple[int, float, float]]

    @property
    def best(self) -> tuple[int, float, float]:
        return next(point for point in self.curve if point[0] == self.best_iteration)


def check_datasets(names: Sequence[str], **per_dataset: Sequence[Any]) -> None:
    """Refuse data sets that are no problem of ours, and settings that do not have one value for each."""
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
    """The data sets, all of them before any training, so that a missing one costs no time."""
    return {name: open_data(PROBLEMS[name]) for name in names}


def command_of(name: str, settings: Any) -> str:
    """The command that has these settings, whatever was said on the command line (`--quick`, say)."""
    usual = type(settings)()
    given = {f.name: as_text(getattr(settings, f.name)) for f in fields(settings)}
    changed = {key: text for key, text in given.items() if text != as_text(getattr(usual, key))}
    return " ".join(["bilevel run", name, *as_options(changed)])


def train(
    path: Path,
    settings: Training,
    data: ImageDataset,
    command: str,
    progress: bool | None,
    kind: Callable[[Training, ImageDataset], FewShotTraining] = FewShotTraining,
) -> Trained:
    """Train in the folder, or go on with, or just read, what is there; the learner has its best weights."""
    job = kind(settings, data)
    ending = train_in(path, job, command, path.name, progress)
    folder = RunFolder(path)
    job.learner.set_weights(read_tensors(folder.best)[0])
    points = [line for line in read_metrics(folder.metrics) if "score" in line]
    curve = [(line["iteration"], line["score"], line["interval"]) for line in points]
    minutes = points[-1]["minutes"] if points else 0.0
    assert ending.best_iteration is not None
    return Trained(
        job.learner,
        settings,
        ending.outcome.kind == "stopped early",
        ending.iteration,
        ending.best_iteration,
        minutes,
        curve,
    )


@dataclass(frozen=True)
class Judged:
    """Accuracy on meta-test with the step size that was best on meta-validation."""

    inner_lr: float
    validation: float
    accuracy: float
    interval: float


def judge_with_steps(
    trained: Trained, data: ImageDataset, sizes: Sequence[float], validation_episodes: int, test_episodes: int
) -> Judged:
    """After T steps, T that of the training. `step_bound` keeps every step below 1/ν, so that none diverges."""
    learner, steps = trained.learner, trained.settings.steps
    learner.batch_norm = "episode"  # the paper's, for everybody
    settings = replace(trained.settings, train_shots=0, outer="query")

    def score(split: str, size: float, count: int) -> Score:
        learner.inner_lr = size
        return judge(learner, episodes(settings, data, split), count, steps)

    tried = {size: score("val", size, validation_episodes).means[-1] for size in sizes}
    size = max(tried, key=lambda one: tried[one])
    test = score("test", size, test_episodes)
    return Judged(size, tried[size], test.means[-1], test.intervals[-1])


def over_seeds(found: Sequence[Judged]) -> Judged:
    """The mean over trainings from several seeds.

    Its interval knows both sources of noise: the episodes' intervals, and how far the seeds' means are apart.

    >>> round(over_seeds([Judged(0.1, 0.5, 0.6, 0.03), Judged(0.1, 0.5, 0.6, 0.03)]).interval, 6)
    0.021213
    """
    count = len(found)
    means = torch.tensor([one.accuracy for one in found], dtype=torch.float64)
    episodes = sum(one.interval**2 for one in found) / count**2
    seeds = 1.96**2 * float(means.var()) / count if count > 1 else 0.0
    validation = sum(one.validation for one in found) / count
    return Judged(found[0].inner_lr, validation, float(means.mean()), (episodes + seeds) ** 0.5)


def differ(one: Judged, other: Judged) -> tuple[float, float]:
    """The difference of two accuracies and the half-width of its 95 % interval, as if they were independent."""
    width = torch.tensor([one.interval, other.interval]).norm()
    return one.accuracy - other.accuracy, float(width)
