"""Few-shot learning in two minutes: a representation learned with ∇f_T, beside FirstOrder and raw pixels.

λ are the weights of a small convolutional network h_λ, and w is a linear classifier of its features, trained anew for
every episode by T gradient steps from zero on one picture of each class (Sections 2.2 and 4). λ is learned twice, from
one start and on the same episodes: with the exact hypergradient, and with FirstOrder, which treats w_T as a constant.
Both are then evaluated on characters of unseen scripts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bilevel.data import ImageDataset, load
from bilevel.experiments._glyphs_picture import Shown, draw
from bilevel.experiments._trainings import Learned, write_run
from bilevel.experiments.base import (
    ExperimentResult,
    ExperimentSettings,
    TextTable,
    require,
    runs_folder,
    single_precision,
)
from bilevel.hyperiterations import Loop, budget
from bilevel.learners.catalogue.hyper_representation import HyperRepresentation
from bilevel.learners.evaluation import GROUP, EpisodeScore, evaluate
from bilevel.learners.settings import TrainingSettings
from bilevel.learners.streams import episodes
from bilevel.learners.training import FewShotTraining, new_learner
from bilevel.models.batch_norm import MEANING
from bilevel.plotting import class_name
from bilevel.progress import counter
from bilevel.thread_pool import one_thread
from bilevel.training.loop import Schedule, drive
from bilevel.training.parts import JobStep, Metrics, Validation

PAPER = "not in the paper: Section 5.2's method on Glyphs, small"

NAMES = {
    "reverse": "learned with Reverse",
    "first-order": "learned with FirstOrder",
    "pixels": "raw pixels",
    "untrained": "untrained network",
}
# The values of `--method` that are compared.
LEARNED = ("reverse", "first-order")
Begin = Callable[[str], None]


@dataclass(frozen=True)
class GlyphsSettings(ExperimentSettings):
    """The full run."""

    seed: int = 0
    ways: int = 5
    shots: int = 1
    queries: int = 5
    meta_batch: int = 2
    steps: int = 5
    inner_lr: float = 0.1
    batch_norm: Literal["episode", "support", "running"] = "episode"
    outer_lr: float = 0.002
    average: float = 0.99
    iterations: int = 1500
    looks: int = 10
    look_episodes: int = 60
    validation_episodes: int = 200
    test_episodes: int = 400
    test_queries: int = 10
    most_steps: int = 15
    step_sizes: tuple[float, ...] = (0.03, 0.1, 0.3, 1.0)


QUICK: dict[str, Any] = {
    "iterations": 80,
    "looks": 4,
    "look_episodes": 20,
    "validation_episodes": 20,
    "test_episodes": 40,
    "step_sizes": (0.1, 0.3),
}


class PixelFeatures(nn.Module):
    """h(x) = x: the features are the pixels. λ is a factor that begins at 1, because a representation needs a λ."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x.flatten(1)


@dataclass(frozen=True)
class EvaluatedGlyphs:
    """The scores of a learner, with the T (and for some learners the step size) that was best on meta-validation."""

    learner: HyperRepresentation
    steps: int
    validation: EpisodeScore
    test: EpisodeScore
    per_episode: Tensor


def run(settings: GlyphsSettings, out: Path, progress: bool | None = None) -> ExperimentResult:
    """Train two learners, evaluate four."""
    _check(settings)
    with single_precision(), one_thread():
        data = load("glyphs", progress=progress)  # it has a progress bar of its own
        with counter("glyphs", _work(settings), progress) as begin:
            learned: dict[str, Learned] = {}
            evaluated: dict[str, EvaluatedGlyphs] = {}
            for method in LEARNED:
                learned[method] = learn(settings, data, method, begin)
                learner = learned[method].learner
                evaluated[method] = evaluate_one(settings, data, NAMES[method], learner, (learner.inner_lr,), begin)
            for name, learner in (("pixels", _pixels(settings, data)), ("untrained", _untrained(settings, data))):
                evaluated[name] = evaluate_one(settings, data, NAMES[name], learner, settings.step_sizes, begin)
        shown = show(settings, data, evaluated["reverse"])
    curves = {method: one.curve for method, one in learned.items()}
    numbers = _numbers(evaluated, _validated(settings), curves, shown)
    draw(
        out / "glyphs.png",
        shown,
        {NAMES[method]: dict(zip(_validated(settings), values, strict=True)) for method, values in curves.items()},
        {NAMES[name]: numbers["accuracy"][name] for name in evaluated},
        f"{settings.ways}-way {settings.shots}-shot",
    )
    for method, one in learned.items():
        write_run(runs_folder(out) / method, _training(settings, method), one, evaluated[method].steps, data)
    return ExperimentResult(
        numbers,
        _choices(settings),
        [_table(settings, evaluated)],
        ("glyphs.png",),
        _notes(settings, numbers),
        runs=[f"runs/{method}" for method in learned],
    )


def learn(settings: GlyphsSettings, data: ImageDataset, method: str, begin: Begin) -> Learned:
    """A representation after all hyperiterations, with its losses and meta-validation accuracies on the way."""
    job = FewShotTraining(_training(settings, method), data)
    validated, lines = _validated(settings), list[dict[str, float]]()

    def write(k: int, numbers: Mapping[str, float]) -> None:
        lines.append({"iteration": k, **numbers})

    def announce(k: int, step: JobStep) -> None:
        begin(NAMES[method] + (f", loss {step.numbers['loss']:.2f}" if step.numbers else ""))

    metrics = Metrics(Schedule.log_every, settings.iterations, write)
    validation = Validation(job, validated.__contains__, write=write)
    loop = Loop([metrics, validation, budget(settings.iterations), announce])
    loop.run(lambda: drive(job, loop))
    job.learner.set_weights(job.weights())
    return Learned(job.learner, lines)


def evaluate_one(
    settings: GlyphsSettings,
    data: ImageDataset,
    name: str,
    learner: HyperRepresentation,
    step_sizes: tuple[float, ...],
    begin: Begin,
) -> EvaluatedGlyphs:
    """The accuracy on test episodes, with T and the step size that were best on meta-validation."""
    wide = replace(_training(settings, "reverse"), queries=settings.test_queries)
    found: list[tuple[float, EpisodeScore]] = []
    for size in step_sizes:
        learner.inner_lr = size
        score = evaluate(
            learner,
            episodes(wide, data, "val"),
            settings.validation_episodes,
            settings.most_steps,
            report=lambda done: begin(f"{name}, choosing T"),
        )
        found.append((size, score))
    learner.inner_lr, validation = max(found, key=lambda pair: max(pair[1].means))
    steps = validation.best_steps
    test = evaluate(
        learner,
        episodes(wide, data, "test"),
        settings.test_episodes,
        steps,
        report=lambda done: begin(f"{name}, unseen scripts"),
    )
    return EvaluatedGlyphs(learner, steps, validation, test, test.per_episode[:, -1])


def show(settings: GlyphsSettings, data: ImageDataset, evaluated: EvaluatedGlyphs) -> Shown:
    """The first test episode with a mistake, or the first of all if there is none."""
    wrong = (evaluated.per_episode < 1).nonzero()
    number = int(wrong[0]) if len(wrong) else 0
    stream = episodes(replace(_training(settings, "reverse"), queries=settings.test_queries), data, "test")
    task = stream.episode(number)
    (support, labels), (queries, _) = task.train, task.val
    predicted = torch.tensor(evaluated.learner.adapt(support, labels, steps=evaluated.steps).predict(queries))
    rows, _ = stream.sampler.draw(number)
    return Shown(
        number,
        [class_name(data.classes[int(data.labels[row])]) for row in rows[:, 0]],
        support[:, 0].unflatten(0, (settings.ways, settings.shots)).numpy(),
        queries[:, 0].unflatten(0, (settings.ways, settings.test_queries)).numpy(),
        predicted.view(settings.ways, -1).tolist(),
    )


def _training(s: GlyphsSettings, method: str) -> TrainingSettings:
    return TrainingSettings(
        dataset="glyphs",
        rotations=False,
        ways=s.ways,
        shots=s.shots,
        queries=s.queries,
        meta_batch=s.meta_batch,
        steps=s.steps,
        inner_lr=s.inner_lr,
        batch_norm=s.batch_norm,
        method="first-order" if method == "first-order" else "reverse",
        lr=s.outer_lr,
        average=s.average,
        iterations=s.iterations,
        validate_every=max(1, round(s.iterations / max(1, s.looks))),
        validation_episodes=s.look_episodes,
        patience=0,
        seed=s.seed,
    )


def _validated(s: GlyphsSettings) -> list[int]:
    """The hyperiterations after which to validate, the start included."""
    return [round(s.iterations * i / s.looks) for i in range(s.looks + 1)]


def _untrained(s: GlyphsSettings, data: ImageDataset) -> HyperRepresentation:
    """The network that both trainings start from, without a bound on the step size, which is chosen on validation."""
    return new_learner(replace(_training(s, "reverse"), step_bound=0.0), data)


def _pixels(s: GlyphsSettings, data: ImageDataset) -> HyperRepresentation:
    height, width, channels = data.shape
    return HyperRepresentation(PixelFeatures(), (channels, height, width), batch_norm=s.batch_norm)


def _work(s: GlyphsSettings) -> int:
    """How often `begin` is called: once for a hyperiteration or a group of episodes, which take about the same time."""
    choosing, final = (ceil(count / GROUP) for count in (s.validation_episodes, s.test_episodes))
    return 2 * s.iterations + (2 + 2 * len(s.step_sizes)) * choosing + 4 * final


def _numbers(
    evaluated: dict[str, EvaluatedGlyphs], seen: list[int], curves: dict[str, list[float]], shown: Shown
) -> dict[str, Any]:
    accuracy = {
        name: {
            "accuracy": one.test.means[-1],
            "interval": one.test.intervals[-1],
            "steps": one.steps,
            "inner_lr": one.learner.inner_lr,
            "validation": one.validation.means[one.steps - 1],
            "validation for every T": list(one.validation.means),
        }
        for name, one in evaluated.items()
    }
    gap = evaluated["reverse"].per_episode - evaluated["first-order"].per_episode
    return {
        "accuracy": accuracy,
        "reverse minus first-order": {
            "accuracy": float(gap.mean()),
            "interval": float(1.96 * gap.std() / len(gap) ** 0.5),
        },
        "hyperiterations": seen,
        "meta-validation while learning": curves,
        "episode": {"number": shown.number, "classes": shown.classes, "predicted": shown.predicted},
    }


def _table(s: GlyphsSettings, evaluated: dict[str, EvaluatedGlyphs]) -> TextTable:
    rows = [
        (
            NAMES[name],
            str(one.steps),
            # In training 1/ν bounds it as well.
            f"≤ {s.inner_lr:g}" if name in LEARNED else f"{one.learner.inner_lr:g}",
            f"{100 * one.validation.means[one.steps - 1]:.2f}",
            f"{100 * one.test.means[-1]:.2f}",
            f"{100 * one.test.intervals[-1]:.2f}",
        )
        for name, one in evaluated.items()
    ]
    return TextTable(
        f"Accuracy in per cent, {s.ways}-way {s.shots}-shot, {s.test_episodes} episodes of unseen scripts",
        ("features", "T", "step size", "meta-validation", "unseen scripts", "± 95 %"),
        rows,
    )


def _notes(s: GlyphsSettings, numbers: dict[str, Any]) -> tuple[str, ...]:
    gap = numbers["reverse minus first-order"]
    return (
        f"Batch norm: {s.batch_norm}, {MEANING[s.batch_norm]}. Raw pixels have none.",
        f"Chance is {100 / s.ways:.0f} per cent. All four are evaluated on the same episodes, with the T from 1 to "
        f"{s.most_steps} that was best on meta-validation. The step size of the unlearned two is the best there of "
        f"{', '.join(f'{size:g}' for size in s.step_sizes)}; the learned two keep the one they were trained "
        "with. Raw pixels have the same classifier and the same dynamics, on 784 numbers from 0 (paper) to 1 (ink).",
        f"Both trainings have the same start and the same episodes. Reverse minus FirstOrder is "
        f"{100 * gap['accuracy']:+.2f} ± {100 * gap['interval']:.2f} points, episode by episode; the interval does not "
        "know how much another start or other training episodes would change (--seed).",
        "A demonstration and no table of the paper: Glyphs and the short training are ours, so the paper has no number "
        "to stand beside these.",
    )


def _choices(s: GlyphsSettings) -> dict[str, str]:
    return {
        "batch norm": f"{s.batch_norm}, {MEANING[s.batch_norm]}",
        "inner step size": f"{s.inner_lr:g}, but never above 1/ν, where ν is the curvature at w_0 = 0",
        "outer optimiser": (
            f"Adam, step {s.outer_lr:g}, {s.iterations} hyperiterations of {s.meta_batch} episodes with {s.queries} "
            f"queries a class; scores are those of λ's moving average, factor {s.average:g}"
        ),
    }


def _check(s: GlyphsSettings) -> None:
    few = "gives no interval"
    s.at_least(2, ways="leaves nothing to tell apart", look_episodes=few, validation_episodes=few, test_episodes=few)
    empty = "leaves a set empty"
    s.at_least(1, shots=empty, queries=empty, test_queries=empty, most_steps="leaves no T to choose")
    require(
        s.shots + max(s.queries, s.test_queries) <= 20,
        f"shots={s.shots} with queries={s.queries} and test_queries={s.test_queries}: a character of Glyphs has 20 "
        "drawings; ask for no more in all.",
    )
    require(
        1 <= s.looks <= s.iterations,
        f"looks={s.looks} must be from 1 to iterations={s.iterations}, to be spread evenly.",
    )
    require(
        bool(s.step_sizes) and all(size > 0 for size in s.step_sizes),
        f"step_sizes={s.step_sizes} must be numbers above 0, at least one.",
    )
    _training(s, "reverse")  # refuses what training cannot take
