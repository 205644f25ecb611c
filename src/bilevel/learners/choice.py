"""Choosing a model of the zoo for given pictures: by their kind, and by the numbers of classes and examples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from bilevel.data.preparation import Preparation
from bilevel.errors import BilevelError
from bilevel.learners import ZOO_PREFIX
from bilevel.learners.calibration import Calibration
from bilevel.learners.library import zoo
from bilevel.learners.settings import TrainingSettings

# Accuracies that differ by less count as equal, because those in the cards are from at most 100 episodes.
CLOSE = 0.01


@dataclass(frozen=True)
class Choice:
    """A model of the zoo, and a sentence that says why it was chosen."""

    spec: str
    why: str


def choose(drawn: int, pictures: int, ways: int, shots: float) -> Choice:
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
    cards = {name: card for name, card in zoo().items() if Preparation.of(card["preparation"]).draws == drawings}
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
    return Choice(ZOO_PREFIX + name, why)


def _scores(card: dict[str, Any]) -> dict[tuple[int, int], float]:
    """Accuracies on meta-test by (ways, shots), in the batch norm mode in which the model is used."""
    mode = card["learner"].get("batch_norm")
    used = "support" if mode == "episode" else mode
    calibrations = [Calibration.of(values) for values in card["calibrations"]]
    return {(made.ways, made.shots): made.accuracy for made in calibrations if made.batch_norm == used}


def _distance(ways: int, shots: float, wanted_ways: int, wanted_shots: float) -> float:
    """How different two shapes of episodes are. The number of examples has twice the weight of that of classes."""
    return 2 * abs(math.log(shots / wanted_shots)) + abs(math.log(ways / wanted_ways))
