"""Calibrated probabilities: a temperature from meta-validation, its error on meta-test, and "none of these".

    p(class | x) = softmax(z/τ),   τ = argmin over τ of the mean of −log p(answer | x)

A picture is "none of these" where the largest logit is below a threshold. The threshold for a false-alarm rate r is the
r-quantile of the largest logits of pictures that do belong to one of the classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bilevel.errors import BilevelError
from bilevel.tasks.episodes import Episodes

if TYPE_CHECKING:
    from bilevel.learners.base import Learner
    from bilevel.learners.classifier import FewShotClassifier

# Equally wide bins of confidence over which the calibration error is summed.
BINS = 15
# The temperature is kept within these bounds; without errors on meta-validation it would go to zero.
COLDEST, HOTTEST = 1 / 64, 64.0
# False-alarm rates for which a card holds a threshold.
RATES = (0.01, 0.02, 0.05, 0.1, 0.2)
QUERIES = 5
# Classifiers that are made to score the labelled pictures by others; more labelled pictures are left out together.
MOST_FOLDS = 10
# Classes, or labelled pictures of each, that nobody has.
MOST = 10**9


@dataclass(frozen=True)
class Calibration:
    """What is known about a learner's logits on episodes with so many classes and examples.

    Attributes:
        ways: classes of the episodes.
        shots: labelled pictures of each class.
        batch_norm: the mode, None for learners without.
        steps: T, None for learners without.
        episodes: as many on meta-validation as on meta-test.
        temperature: τ, from meta-validation.
        error_before: expected calibration error on meta-test with τ = 1.
        error: the same with τ.
        accuracy: on meta-test.
        thresholds: by false-alarm rate, the largest logit below which a picture is "none of these".
        false_alarms: by rate, the share of pictures of the classes that were called so on meta-test.
        found: by rate, the share of pictures of other classes that were called so; None without other classes.
    """

    ways: int
    shots: int
    batch_norm: str | None
    steps: int | None
    episodes: int
    temperature: float
    error_before: float
    error: float
    accuracy: float
    thresholds: dict[str, float]
    false_alarms: dict[str, float]
    found: dict[str, float] | None

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Calibration:
        try:
            made = cls(**values)
            numbers = [made.temperature, *made.thresholds.values()]
            bounded = all(math.isfinite(number) for number in numbers) and COLDEST <= made.temperature <= HOTTEST
            counted = all(type(number) is int and 1 <= number <= MOST for number in (made.ways, made.shots))
            if not bounded or not counted:
                raise ValueError("a number in it is out of bounds")
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise BilevelError(
                f"The calibration in the card cannot be used: {error}. Evaluate the model again."
            ) from error
        return made

    def threshold(self, rate: float) -> float:
        """The largest logit below which a picture is "none of these" with this false-alarm rate."""
        key = f"{rate:g}"
        if key not in self.thresholds:
            raise BilevelError(
                f"--none {rate:g} is not known to the model's card; it has {', '.join(self.thresholds)}."
            )
        return self.thresholds[key]

    def describe_found(self, rate: float) -> str:
        """How many pictures of other classes were called so on meta-test, as a sentence; "" where that is not known."""
        share = (self.found or {}).get(f"{rate:g}")
        if share is None:
            return ""
        said = f" On meta-test it found {share:.0%} of pictures of other classes"
        return (
            f"{said}, hardly more than by chance: do not rely on it with this model."
            if share < 2 * rate
            else f"{said}."
        )


def temperature(logits: Tensor, answers: Tensor) -> float:
    """τ > 0 with the least mean cross-entropy of softmax(z/τ). The objective is convex in β = 1/τ: safeguarded Newton.

    >>> z = torch.tensor([[2.0, 0.0], [2.0, 0.0], [2.0, 0.0], [2.0, 0.0]])
    >>> round(temperature(z, torch.tensor([0, 0, 0, 1])), 4)  # three of four right: 2/τ = log 3
    1.8205
    """
    z = logits.double() - logits.double().gather(1, answers[:, None])
    low, high = 1 / HOTTEST, 1 / COLDEST
    beta = 1.0
    for _ in range(100):
        p = (beta * z).softmax(1)
        mean = (p * z).sum(1)
        slope, curvature = float(mean.mean()), float(((p * z.square()).sum(1) - mean.square()).mean())
        low, high = (low, beta) if slope > 0 else (beta, high)
        step = beta - slope / curvature if curvature > 0 else math.inf
        new = step if low < step < high else (low * high) ** 0.5
        if abs(new - beta) <= 1e-12 * beta:
            break
        beta = new
    return min(max(1 / beta, COLDEST), HOTTEST)


def calibration_error(probabilities: Tensor, answers: Tensor, bins: int = BINS) -> float:
    """Σ over bins of confidence of (share of pictures)·|accuracy − mean confidence| (Guo et al., 2017).

    >>> calibration_error(torch.tensor([[0.8, 0.2], [0.8, 0.2]]), torch.tensor([0, 1]))  # |1/2 − 0.8|
    0.3
    """
    confidence, said = probabilities.double().max(1)
    right = (said == answers).double()
    which = (confidence * bins).ceil().long().clamp(1, bins) - 1
    gaps = torch.zeros(bins, dtype=torch.float64).index_add_(0, which, right - confidence)
    return round(float(gaps.abs().sum()) / len(answers), 12)


def quantile(scores: Tensor, rate: float) -> float:
    """The largest value below which at most a share `rate` of the scores lies."""
    ordered = scores.double().sort().values
    return float(ordered[min(int(rate * len(ordered)), len(ordered) - 1)])


def calibrate(learner: Learner, val: Episodes, test: Episodes, count: int, steps: int) -> Calibration:
    """Fit on episodes 0…count − 1 of meta-validation, and measure on as many of meta-test.

    Args:
        learner: in the batch norm mode in which it will be used.
        val: episodes of meta-validation.
        test: episodes of meta-test, with the same ways and shots.
        count: how many of each.
        steps: T.
    """
    logits, answers, strangers = _logits(learner, val, count, steps)
    tau = temperature(logits, answers)
    best = logits.max(1).values
    thresholds = {f"{rate:g}": quantile(best, rate) for rate in RATES}
    logits, answers, strangers = _logits(learner, test, count, steps)
    best, others = logits.max(1).values, None if strangers is None else strangers.max(1).values
    return Calibration(
        val.ways,
        val.shots,
        learner.batch_norm if learner.has_batch_norm else None,
        steps if learner.has_steps else None,
        count,
        tau,
        calibration_error(logits.double().softmax(1), answers),
        calibration_error((logits.double() / tau).softmax(1), answers),
        float((logits.argmax(1) == answers).double().mean()),
        thresholds,
        {key: float((best < bound).double().mean()) for key, bound in thresholds.items()},
        None if others is None else {key: float((others < bound).double().mean()) for key, bound in thresholds.items()},
    )


def own_threshold(classifier: FewShotClassifier, rate: float) -> tuple[float, int] | None:
    """A threshold from the labelled pictures themselves, each scored by a classifier without it, and their number.

    The k-th smallest of n scores, k = ⌊rate·(n + 1)⌋, is undercut by a new picture of the classes with probability at
    most k/(n + 1) if its score is distributed like theirs. None where there are too few pictures for this rate.
    """
    numbers, images = classifier.numbers, classifier.support
    place = torch.cat([torch.arange(int(count)) for count in torch.bincount(numbers)])
    order = torch.argsort(numbers, stable=True)
    fold = torch.empty_like(numbers)
    fold[order] = place % MOST_FOLDS
    counts = torch.bincount(numbers)
    if int(counts.min()) < 2 or int(rate * (len(numbers) + 1)) < 1:
        return None
    scores = []
    for held in range(min(MOST_FOLDS, int(counts.max()))):
        out = fold == held
        steps = classifier.steps if classifier.learner.has_steps else None
        rest = classifier.learner.adapt(images[~out], numbers[~out], steps)
        scores.append(rest.scores(images[out]).max(1).values)
    ordered = torch.cat(scores).double().sort().values
    return float(ordered[int(rate * (len(ordered) + 1)) - 1]), len(ordered)


def nearest(calibrations: Sequence[Mapping[str, Any]], ways: int, shots: float, mode: str | None) -> Calibration | None:
    """The calibration for the nearest number of classes and examples, by ratio, in that batch norm mode."""
    known = [Calibration.of(values) for values in calibrations]
    known = [one for one in known if one.batch_norm == mode]
    return min(known, key=lambda one: _distance(one, ways, shots), default=None)


def _distance(one: Calibration, ways: int, shots: float) -> float:
    return abs(math.log(one.ways / ways)) + abs(math.log(one.shots / shots))


@torch.no_grad()
def _logits(learner: Learner, episodes: Episodes, count: int, steps: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Logits of the queries, their answers, and logits of queries of as many other classes as there are."""
    ways = episodes.ways
    others = min(ways, episodes.sampler.count - ways)
    drawn = replace(episodes, ways=ways + others, queries=min(episodes.queries, QUERIES))
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for number in range(count):
        task = drawn(number)
        (images, labels), (queries, answers, *_) = task.train, task.val
        classifier = learner.adapt(images[labels < ways], labels[labels < ways], steps if learner.has_steps else None)
        ours = answers < ways
        # Apart, because the statistics of a query set must not know of the strangers.
        strange = classifier.scores(queries[~ours]) if others else classifier.scores(queries[ours])[:0]
        parts.append((classifier.scores(queries[ours]), answers[ours], strange))
    logits, answers, strange = (torch.cat(part) for part in zip(*parts, strict=True))
    return logits, answers, strange if others else None
