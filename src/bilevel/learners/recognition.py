"""Using a trained model: choose and load it, adapt it to labelled pictures, and set a threshold for "none of these".

`bilevel classify`, `bilevel export` and `bilevel app` use these functions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bilevel.data.preparation import Preparation
from bilevel.errors import BilevelError
from bilevel.learners import ZOO_PREFIX, calibration, library
from bilevel.learners.classifier import FewShotClassifier
from bilevel.learners.library import TrainedLearner
from bilevel.learners.settings import TrainingSettings
from bilevel.models.batch_norm import MODES
from bilevel.source_commit import commit

# The prediction for a picture of none of the classes.
NONE = "none of these"
# Accuracies that differ by less count as equal, because those in the cards are from at most 100 episodes.
CLOSE = 0.01


def trained(spec: str, batch_norm: str | None) -> TrainedLearner:
    """The model that `spec` names, in a batch norm mode; None: one in which predictions are independent."""
    if batch_norm is not None and batch_norm not in MODES:
        raise BilevelError(f"--batch-norm {batch_norm} is unknown; write one of {', '.join(MODES)}.")
    try:
        model = library.find(spec, batch_norm)
        return model if batch_norm else model.for_use()
    except (KeyError, TypeError) as error:
        raise BilevelError(
            f"The card of {spec} is incomplete: {error!r}. Train the model again, or pass another one."
        ) from error


def adapted(model: TrainedLearner, images: Any, labels: list[str], steps: int | None = None) -> FewShotClassifier:
    """The model adapted to labelled pictures, with the temperature of the nearest calibration in its card."""
    classifier: FewShotClassifier = model.learner.adapt(images, labels, steps)
    made = _calibration(model, classifier)
    if made is not None:
        classifier.temperature = made.temperature
    return classifier


def saved_classifier(spec: str) -> tuple[TrainedLearner, FewShotClassifier] | None:
    """A saved classifier and the model that it was made with; None if `spec` does not name a saved classifier."""
    if not Path(spec).is_file() or Path(spec).suffix != ".safetensors" or Path(spec).with_suffix(".json").exists():
        return None
    classifier, facts = FewShotClassifier.load(spec)
    try:
        settings, name = TrainingSettings.of(facts["settings"]), f"{facts['model']}, kept in {Path(spec).name}"
        Preparation.of(facts["preparation"])
    except (KeyError, TypeError) as error:
        raise BilevelError(
            f"{spec} was not written by `bilevel classify … --save`: it has no {error}. Save the classifier again."
        ) from error
    return TrainedLearner(name, classifier.learner, settings, facts, {}), classifier


def facts_to_save(model: TrainedLearner, preparation: Preparation) -> dict[str, Any]:
    """What `saved_classifier` needs in addition to the classifier, as JSON types."""
    facts = {"model": model.name, "settings": model.settings.plain(), "commit": commit()}
    return {**facts, "preparation": preparation.plain(), "calibrations": model.calibrations}


@dataclass(frozen=True)
class NoneOfThese:
    """The threshold on the score, below which a picture is of none of the classes, and where it comes from."""

    classifier: FewShotClassifier
    score: str
    bound: float
    why: str

    def __call__(self, images: Any) -> list[bool]:
        """Which pictures are of none of the classes."""
        return (calibration.SCORES[self.score](self.classifier, images) < self.bound).tolist()


def none_of_these(model: TrainedLearner, classifier: FewShotClassifier, rate: float) -> NoneOfThese:
    """The threshold for a false-alarm rate: from the labelled pictures if there are enough, else from the card."""
    if not 0 < rate < 1:
        raise BilevelError(f"--none {rate:g} is not a rate; write a number between 0 and 1, for example 0.05.")
    sentence = f'"None of these" has a false-alarm rate of {rate:.0%}'
    made = _calibration(model, classifier)
    score, found = ("logit", "") if made is None else (made.score, made.describe_found(rate))
    from_support = calibration.threshold_from_support(classifier, rate, score)
    if from_support is not None:
        bound, count = from_support
        why = f"{sentence}, set by the {count} labelled pictures, each left out in turn.{found}"
        return NoneOfThese(classifier, score, bound, why)
    if made is None:
        raise BilevelError(
            f'"None of these" at a rate of {rate:.0%} needs two or more labelled pictures of each class and '
            f"{math.ceil(1 / rate) - 1} in all, or a model that `bilevel evaluate` has calibrated, and {model.name} is "
            "not."
        )
    source = f"set on meta-validation, {made.ways}-way {made.shots}-shot; other kinds of pictures may have another"
    return NoneOfThese(classifier, score, made.threshold(rate), f"{sentence}, {source}.{found}")


def _calibration(model: TrainedLearner, classifier: FewShotClassifier) -> calibration.Calibration | None:
    """The calibration in the card with the nearest numbers of classes and of labelled pictures."""
    counts = torch.bincount(classifier.numbers).double()
    mode = classifier.learner.batch_norm if classifier.learner.has_batch_norm else None
    return calibration.nearest(model.calibrations, len(counts), float(counts.mean()), mode)


@dataclass(frozen=True)
class ModelChoice:
    """A model of the zoo, and a sentence that says why it was chosen."""

    spec: str
    why: str


def choose(drawn: int, pictures: int, ways: int, shots: float) -> ModelChoice:
    """The model of the zoo for these pictures: of drawings, if most of them look drawn, else of photographs.

    Args:
        drawn: how many of the pictures look like drawings.
        pictures: the number of pictures.
        ways: the number of classes.
        shots: the mean number of labelled pictures per class.

    >>> choose(drawn=30, pictures=30, ways=10, shots=5).spec
    'zoo:omniglot-20way-5shot'
    """
    drawings = 2 * drawn > pictures
    kind = "drawings" if drawings else "photographs"
    cards = {
        name: card for name, card in library.zoo().items() if Preparation.of(card["preparation"]).draws == drawings
    }
    if not cards:
        raise BilevelError(f"The zoo has no model of {kind}. Pass the folder of a run that you have trained.")
    scores = {name: _scores(card) for name, card in cards.items()}
    shapes = {shape for by_shape in scores.values() for shape in by_shape}
    nearest = min(shapes, key=lambda shape: (_distance(shape[0], shape[1], ways, shots), shape))
    accuracies = {name: by_shape[nearest] for name, by_shape in scores.items() if nearest in by_shape}
    good = [name for name in accuracies if accuracies[name] >= max(accuracies.values()) - CLOSE]
    trained = {name: TrainingSettings.of(cards[name]["settings"]) for name in good}
    name = min(good, key=lambda name: (_distance(trained[name].ways, trained[name].shots, ways, shots), name))
    why = (
        f"{drawn} of {pictures} pictures look like drawings, so a model of {kind} was taken. {ZOO_PREFIX}{name} is the "
        f"best one of the zoo, or within a point of it, for {nearest[0]}-way {nearest[1]}-shot episodes (meta-test: "
        f"{accuracies[name]:.1%}), which are nearest to these {ways} classes with {shots:g} labelled "
        f"picture{'s' * (shots != 1)} each."
    )
    return ModelChoice(ZOO_PREFIX + name, why)


def _scores(card: dict[str, Any]) -> dict[tuple[int, int], float]:
    """Accuracies on meta-test by (ways, shots), in the batch norm mode in which the model is used."""
    mode = card["learner"].get("batch_norm")
    used = "support" if mode == "episode" else mode
    calibrations = [calibration.Calibration.of(values) for values in card["calibrations"]]
    return {(made.ways, made.shots): made.accuracy for made in calibrations if made.batch_norm == used}


def _distance(ways: int, shots: float, wanted_ways: int, wanted_shots: float) -> float:
    """How different two shapes of episodes are. The number of examples has twice the weight of that of classes."""
    return 2 * abs(math.log(shots / wanted_shots)) + abs(math.log(ways / wanted_ways))
