"""Evaluating a learner: accuracy over many episodes with its 95 % interval, for every number of inner steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bilevel.distributed import World
from bilevel.errors import BilevelError
from bilevel.learners.picture_features import KnownFeatures, with_features
from bilevel.tasks.episodes import Episodes
from bilevel.training.stopping import Interrupted, StopRequest

if TYPE_CHECKING:
    from bilevel.learners.base import Learner

# How many episodes are drawn and classified at a time. It bounds memory and does not change the result.
GROUP = 20
# The share of the time that computing features takes, for the progress bar.
FEATURES = 0.9


@dataclass(frozen=True)
class EpisodeScore:
    """Mean accuracy after every number of steps 1…T, and the half-width of its 95 % interval, 1.96·std/√episodes.

    `per_episode` holds the accuracies of all episodes, episodes × steps.
    """

    means: tuple[float, ...]
    intervals: tuple[float, ...]
    episodes: int
    per_episode: Tensor = field(default_factory=lambda: torch.empty(0, 0), repr=False, compare=False)

    @property
    def best_steps(self) -> int:
        """The number of steps with the highest mean; the smallest one if several are equal."""
        return 1 + max(range(len(self.means)), key=lambda i: (self.means[i], -i))


def evaluate(
    learner: Learner,
    episodes: Episodes,
    count: int,
    steps: int | None,
    world: World | None = None,
    report: Callable[[int], None] = lambda done: None,
    stop: StopRequest | bool = False,
    known: KnownFeatures | None = None,
) -> EpisodeScore:
    """The score on episodes 0…count − 1, after 1…steps inner steps; None: after the learner's last step only.

    It raises `Interrupted` if a process is asked to stop. `known` is as for `with_features`.
    """
    if count < 2:
        raise BilevelError(f"{count} episodes give no interval; pass at least 2.")
    world = world or World()
    columns = steps if steps is not None and learner.has_steps else 1
    table = torch.zeros(count, columns, dtype=torch.float64)
    done, already, drawn = 0, 0.0, episodes.batch
    share = partial(_report_share, report, FEATURES * count)
    once = with_features(learner, episodes, count, world, share, stop, known)
    if once is not None:
        (learner, pictures), already = once, FEATURES
        drawn = pictures.batch
    for group in world.share([range(first, min(first + GROUP, count)) for first in range(0, count, GROUP)]):
        if stop:
            break
        table[group.start : group.stop] = learner.accuracies(drawn(group), steps, only_last=steps is None)
        done += len(group)
        report(round(already * count + (1 - already) * min(done * world.size, count)))
    if world.any(bool(stop)):
        raise Interrupted
    world.sum(table)
    means, deviations = table.mean(0), table.std(0)
    return EpisodeScore(tuple(means.tolist()), tuple((1.96 * deviations / count**0.5).tolist()), count, table)


def _report_share(report: Callable[[int], None], most: float, done: float) -> None:
    report(int(most * done))


@dataclass(frozen=True)
class FinalScore:
    """Scores on meta-validation for every T, the best T there, and the score on meta-test with that T."""

    validation: EpisodeScore
    steps: int
    test: EpisodeScore

    @property
    def accuracy(self) -> float:
        return self.test.means[-1]

    @property
    def interval(self) -> float:
        return self.test.intervals[-1]


def choose_and_test(
    learner: Learner,
    val: Episodes,
    test: Episodes,
    count: int,
    tried: range,
    report: Callable[[int], None] = lambda done: None,
    known: KnownFeatures | None = None,
) -> FinalScore:
    """Choose T among `tried` on `count` episodes of meta-validation, and evaluate it once on as many of meta-test."""
    tried = tried if learner.has_steps else range(1, 2)
    validation = evaluate(learner, val, count, tried[-1], report=report, known=known)
    steps = max(tried, key=lambda t: (validation.means[t - 1], -t))
    tested = evaluate(learner, test, count, steps, report=lambda done: report(count + done), known=known)
    return FinalScore(validation, steps, tested)
