"""A trained model put to use: found, adapted to labelled pictures, calibrated, with a threshold for "none of these".

`bilevel classify`, `bilevel export` and `bilevel app` all go this way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bilevel.data.preparation import Preparation
from bilevel.errors import BilevelError
from bilevel.learners import calibration, library
from bilevel.learners.classifier import FewShotClassifier
from bilevel.learners.library import TrainedLearner
from bilevel.learners.settings import TrainingSettings
from bilevel.models.batch_norm import MODES
from bilevel.source_commit import commit

# What is said about a picture of none of the classes.
NONE = "none of these"


def trained(spec: str, batch_norm: str | None) -> TrainedLearner:
    """The model that `spec` names, in a batch norm mode; None: the one in which a query stands for itself."""
    if batch_norm is not None and batch_norm not in MODES:
        raise BilevelError(f"--batch-norm {batch_norm} is unknown; write one of {', '.join(MODES)}.")
    try:
        found = library.find(spec, batch_norm)
        return found if batch_norm else found.for_use()
    except (KeyError, TypeError) as error:
        raise BilevelError(
            f"The description of {spec} is incomplete: {error}. Train it again, or use another."
        ) from error


def adapted(model: TrainedLearner, images: Any, labels: list[str], steps: int | None = None) -> FewShotClassifier:
    """The model adapted to labelled pictures, with the temperature of its card's nearest calibration."""
    classifier: FewShotClassifier = model.learner.adapt(images, labels, steps)
    made = _calibration(model, classifier)
    if made is not None:
        classifier.temperature = made.temperature
    return classifier


def kept_classifier(spec: str) -> tuple[TrainedLearner, FewShotClassifier] | None:
    """A classifier that was saved, and where it came from; None where `spec` names something else."""
    if not Path(spec).is_file() or Path(spec).suffix != ".safetensors" or Path(spec).with_suffix(".json").exists():
        return None
    classifier, facts = FewShotClassifier.load(spec)
    try:
        settings, name = TrainingSettings.of(facts["settings"]), f"{facts['model']}, kept in {Path(spec).name}"
        Preparation.of(facts["preparation"])
    except (KeyError, TypeError) as error:
        raise BilevelError(
            f"{spec} was not written by `bilevel classify … --save`: it does not say {error}."
        ) from error
    return TrainedLearner(name, classifier.learner, settings, facts, {}), classifier


def facts_to_keep(model: TrainedLearner, preparation: Preparation) -> dict[str, Any]:
    """What `kept_classifier` needs beside the classifier itself, in JSON's types."""
    facts = {"model": model.name, "settings": model.settings.plain(), "commit": commit()}
    return {**facts, "preparation": preparation.plain(), "calibrations": model.calibrations}


@dataclass(frozen=True)
class NoneOfThese:
    """The largest logit below which a picture is of none of the classes, and what that number rests on."""

    bound: float
    why: str

    def __call__(self, scores: Tensor) -> list[bool]:
        """Which pictures with these logits, N × classes, are of none of them."""
        return (scores.max(1).values.double() < self.bound).tolist()


def none_of_these(model: TrainedLearner, classifier: FewShotClassifier, rate: float) -> NoneOfThese:
    """The threshold for a false-alarm rate, from the labelled pictures where they are enough, else from the card."""
    if not 0 < rate < 1:
        raise BilevelError(f"--none {rate:g} is no rate; write a number between 0 and 1, 0.05 for example.")
    said = f'"None of these" has a false-alarm rate of {rate:.0%}'
    own, made = calibration.own_threshold(classifier, rate), _calibration(model, classifier)
    found = "" if made is None else made.describe_found(rate)
    if own is not None:
        bound, count = own
        return NoneOfThese(bound, f"{said}, set by the {count} labelled pictures, each left out in turn.{found}")
    if made is None:
        raise BilevelError(
            f'"None of these" at a rate of {rate:.0%} needs two or more labelled pictures of each class and '
            f"{math.ceil(1 / rate) - 1} in all, or a model that `bilevel evaluate` has calibrated, and {model.name} is "
            "not."
        )
    source = f"set on meta-validation, {made.ways}-way {made.shots}-shot; other kinds of pictures may have another"
    return NoneOfThese(made.threshold(rate), f"{said}, {source}.{found}")


def _calibration(model: TrainedLearner, classifier: FewShotClassifier) -> calibration.Calibration | None:
    """The card's calibration for the nearest numbers of classes and labelled pictures."""
    counts = torch.bincount(classifier.numbers).double()
    mode = classifier.learner.batch_norm if classifier.learner.has_batch_norm else None
    return calibration.nearest(model.calibrations, len(counts), float(counts.mean()), mode)
