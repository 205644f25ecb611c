"""Calibrated probabilities: a temperature from meta-validation, its error on meta-test, and "none of these".

    p(class | x) = softmax(z/τ),   τ = argmin over τ of the mean of −log p(answer | x), smoothed; see `temperature`

A picture is "none of these" if its score is below a threshold. The threshold for a false-alarm rate r is the r-quantile
of the scores of pictures that belong to one of the classes. There are two scores (`SCORES`):

- "distance": −min over classes of ‖φ(x) − mean of φ over the labelled pictures of the class‖ with the representation φ;
- "logit": the largest logit. Noise and pictures of other classes may have large logits too, because a linear classifier
  is only trained to distinguish its classes.

A calibration uses the score that finds more pictures of other classes on meta-validation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bilevel.errors import BilevelError
from bilevel.learners.picture_features import KnownFeatures, with_features
from bilevel.problem import Task
from bilevel.tasks.episodes import Episodes

if TYPE_CHECKING:
    from bilevel.learners.base import Learner
    from bilevel.learners.classifier import FewShotClassifier

# The number of equally wide bins of confidence in the calibration error.
BINS = 15
# Bounds of the temperature.
COLDEST, HOTTEST = 1 / 64, 64.0
# False-alarm rates for which a card holds a threshold.
RATES = (0.01, 0.02, 0.05, 0.1, 0.2)
# Queries of each class in an episode of a calibration, at most.
QUERIES = 5
# The most folds of the cross-validation over the labelled pictures.
MOST_FOLDS = 10
# A number of classes, or of labelled pictures per class, above this one is an error in the file.
MOST = 10**9


def largest_logit(logits: Tensor) -> Tensor:
    return logits.max(1).values.double()


def nearness(class_distances: Tensor) -> Tensor:
    return -class_distances.min(1).values.double()


# Scores that are large for pictures of one of the classes and small for pictures of none of them.
SCORES: dict[str, Callable[[FewShotClassifier, Any], Tensor]] = {
    "logit": lambda classifier, images: largest_logit(classifier.scores(images)),
    "distance": lambda classifier, images: nearness(classifier.class_distances(images)),
}


@dataclass(frozen=True)
class Calibration:
    """How to turn a learner's logits into probabilities, measured on episodes with one number of ways and of shots.

    Attributes:
        ways: classes of an episode.
        shots: labelled pictures of each class.
        batch_norm: the batch norm mode; None for learners without batch norm.
        steps: T; None for learners without inner steps.
        episodes: the number of episodes on meta-validation, and on meta-test.
        temperature: τ, from meta-validation.
        error_before: expected calibration error on meta-test with τ = 1.
        error: expected calibration error on meta-test with the fitted τ.
        accuracy: on meta-test.
        thresholds: for every false-alarm rate, the threshold on the score; below it a picture is "none of these".
        false_alarms: for every rate, the share of pictures of the classes that were "none of these" on meta-test.
        found: for every rate, the share of pictures of other classes that were "none of these"; None if there are no
            other classes.
        score: the name of the score in `SCORES`.
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
    score: str = "logit"

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Calibration:
        try:
            made = cls(**values)
            shares = [*made.false_alarms.values(), *({} if made.found is None else made.found).values()]
            finite = all(map(math.isfinite, [made.temperature, *made.thresholds.values(), *shares]))
            counts = all(type(count) is int and 1 <= count <= MOST for count in (made.ways, made.shots))
            if not finite or not COLDEST <= made.temperature <= HOTTEST or not counts:
                raise ValueError("a number in it is out of bounds")
            if made.score not in SCORES:
                raise ValueError(f"there is no score {made.score!r:.60}")
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise BilevelError(
                f"The calibration in the card cannot be used: {error}. Evaluate the model again."
            ) from error
        return made

    def threshold(self, rate: float) -> float:
        """The threshold on the score for this false-alarm rate."""
        key = f"{rate:g}"
        if key not in self.thresholds:
            raise BilevelError(
                f"The model's card has no threshold for --none {rate:g}. Pass one of {', '.join(self.thresholds)}."
            )
        return self.thresholds[key]

    def describe_found(self, rate: float) -> str:
        """The share of pictures of other classes that were found on meta-test, as a sentence; "" if it is unknown."""
        share = (self.found or {}).get(f"{rate:g}")
        if share is None:
            return ""
        warning = ", hardly more than by chance: do not rely on it with this model" if share < 2 * rate else ""
        return f" On meta-test it found {share:.0%} of pictures of other classes{warning}."


def temperature(logits: Tensor, answers: Tensor) -> float:
    """τ > 0 that minimises the mean cross-entropy of softmax(z/τ), with 1/(N + C) as the target of every wrong class.

    N is the number of pictures and C that of classes (Platt, 1999). Without this, τ would be zero if there is no error
    among the pictures, and every later answer would have a probability of 1.

    The objective is convex in β = 1/τ, and is minimised over β by a safeguarded Newton method.

    >>> z = torch.tensor([[2.0, 0.0], [2.0, 0.0], [2.0, 0.0], [2.0, 0.0]])
    >>> round(temperature(z, torch.tensor([0, 0, 0, 1])), 4)  # the targets' mean is 2/3: 2/τ = log 2
    2.8854
    """
    z = logits.double() - logits.double().gather(1, answers[:, None])
    wanted = z.sum(1) / sum(z.shape)
    low, high = 1 / HOTTEST, 1 / COLDEST
    beta = 1.0
    for _ in range(100):
        p = (beta * z).softmax(1)
        mean = (p * z).sum(1)
        slope, curvature = float((mean - wanted).mean()), float(((p * z.square()).sum(1) - mean.square()).mean())
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
    confidence, predicted = probabilities.double().max(1)
    correct = (predicted == answers).double()
    bin_of = (confidence * bins).ceil().long().clamp(1, bins) - 1
    gaps = torch.zeros(bins, dtype=torch.float64).index_add_(0, bin_of, correct - confidence)
    return round(float(gaps.abs().sum()) / len(answers), 12)


def quantile(scores: Tensor, rate: float) -> float:
    """The largest value below which at most a share `rate` of the scores lies."""
    ordered = scores.double().sort().values
    return float(ordered[min(int(rate * len(ordered)), len(ordered) - 1)])


def calibrate(
    learner: Learner, val: Episodes, test: Episodes, count: int, steps: int, known: KnownFeatures | None = None
) -> Calibration:
    """Fit on episodes 0…count − 1 of meta-validation, and measure on the same number of meta-test.

    Args:
        learner: in the batch norm mode in which it will be used.
        val: episodes of meta-validation.
        test: episodes of meta-test, with the same ways and shots.
        count: the number of episodes of each split.
        steps: T.
        known: as for `with_features`.
    """
    queries = _classified(learner, val, count, steps, known)
    tau = temperature(queries.logits, queries.answers)
    score, thresholds = _best_score(queries)
    queries = _classified(learner, test, count, steps, known)

    def share_below(scores: Tensor) -> dict[str, float]:
        return {key: float((scores < bound).double().mean()) for key, bound in thresholds.items()}

    return Calibration(
        val.ways,
        val.shots,
        learner.batch_norm if learner.has_batch_norm else None,
        steps if learner.has_steps else None,
        count,
        tau,
        calibration_error(queries.logits.double().softmax(1), queries.answers),
        calibration_error((queries.logits.double() / tau).softmax(1), queries.answers),
        float((queries.logits.argmax(1) == queries.answers).double().mean()),
        thresholds,
        share_below(queries.scores[score]),
        None if queries.scores_of_others is None else share_below(queries.scores_of_others[score]),
        score,
    )


def _best_score(queries: _ClassifiedQueries) -> tuple[str, dict[str, float]]:
    """The score that finds most pictures of other classes, and its thresholds."""
    scores = queries.scores
    thresholds = {name: {f"{rate:g}": quantile(values, rate) for rate in RATES} for name, values in scores.items()}
    middle = f"{RATES[len(RATES) // 2]:g}"
    others = queries.scores_of_others
    found = {
        name: 0.0 if others is None else float((others[name] < bounds[middle]).double().mean())
        for name, bounds in thresholds.items()
    }
    best = max(found, key=lambda name: found[name])
    return best, thresholds[best]


def threshold_from_support(
    classifier: FewShotClassifier, rate: float, score: str = "logit"
) -> tuple[float, int] | None:
    """A threshold from the labelled pictures, each scored by a classifier without it; and the number of pictures.

    The threshold is the k-th smallest of n scores, k = ⌊rate·(n + 1)⌋. A new picture of the classes has a lower score
    with probability at most k/(n + 1), if its score has the same distribution. The result is None if there are too few
    pictures for this rate.
    """
    numbers, images = classifier.numbers, classifier.support
    counts = torch.bincount(numbers)
    place_in_class = torch.cat([torch.arange(int(count)) for count in counts])
    fold = torch.empty_like(numbers)
    fold[torch.argsort(numbers, stable=True)] = place_in_class % MOST_FOLDS
    if int(counts.min()) < 2 or int(rate * (len(numbers) + 1)) < 1:
        return None
    scores = []
    steps = classifier.steps if classifier.learner.has_steps else None
    for k in range(min(MOST_FOLDS, int(counts.max()))):
        left_out = fold == k
        others = classifier.learner.adapt(images[~left_out], numbers[~left_out], steps)
        scores.append(SCORES[score](others, images[left_out]))
    ordered = torch.cat(scores).sort().values
    return float(ordered[int(rate * (len(ordered) + 1)) - 1]), len(ordered)


def nearest(calibrations: Sequence[Mapping[str, Any]], ways: int, shots: float, mode: str | None) -> Calibration | None:
    """The calibration in that batch norm mode with the nearest ways and shots, compared by their ratios."""
    candidates = [made for made in map(Calibration.of, calibrations) if made.batch_norm == mode]
    return min(candidates, key=lambda made: _distance(made, ways, shots), default=None)


def _distance(made: Calibration, ways: int, shots: float) -> float:
    return abs(math.log(made.ways / ways)) + abs(math.log(made.shots / shots))


@dataclass(frozen=True)
class _ClassifiedQueries:
    """Logits, answers and scores by name of the queries of episodes, and the scores of queries of other classes."""

    logits: Tensor
    answers: Tensor
    scores: dict[str, Tensor]
    scores_of_others: dict[str, Tensor] | None


@torch.no_grad()
def _classified(
    learner: Learner, episodes: Episodes, count: int, steps: int, known: KnownFeatures | None
) -> _ClassifiedQueries:
    """The queries of episodes 0…count − 1, and queries of other classes: at most as many classes as in an episode."""
    ways = episodes.ways
    others = min(ways, episodes.sampler.count - ways)
    drawn = replace(episodes, ways=ways + others, queries=min(episodes.queries, QUERIES))
    logits, given, own, outside = [], [], [], []
    episode: Callable[[int], Task] = drawn.episode
    if (once := with_features(learner, drawn, count, known=known)) is not None:
        learner, episode = once[0], once[1].episode
    for number in range(count):
        task = episode(number)
        (images, labels), (queries, answers, *_) = task.train, task.val
        classifier = learner.adapt(images[labels < ways], labels[labels < ways], steps if learner.has_steps else None)
        inside = answers < ways
        found, scores = _scored(classifier, queries[inside])
        logits.append(found)
        given.append(answers[inside])
        own.append(scores)
        if others:  # a separate call, because batch norm may use statistics of a query set
            outside.append(_scored(classifier, queries[~inside])[1])
    return _ClassifiedQueries(torch.cat(logits), torch.cat(given), _joined(own), _joined(outside) if others else None)


def _scored(classifier: FewShotClassifier, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits, and all `SCORES`, of images."""
    logits, distances = classifier.scores_and_class_distances(images)
    return logits, {"logit": largest_logit(logits), "distance": nearness(distances)}


def _joined(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in SCORES}
