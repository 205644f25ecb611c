"""Which model of the zoo to take: one for the kind of the pictures, best for about as many classes and examples."""

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

# Models whose accuracies differ by less are equally good: the cards' accuracies are those of 100 episodes or fewer.
CLOSE = 0.01


@dataclass(frozen=True)
class Choice:
    """A model of the zoo, and why it was chosen, as a sentence."""

    spec: str
    why: str


def choose(drawn: int, pictures: int, ways: int, shots: float) -> Choice:
    """A model for pictures of which so many are drawings.

    Args:
        drawn: how many of the pictures look like drawings.
        pictures: how many there are.
        ways: the number of classes.
        shots: labelled pictures of each class, on average.

    >>> choose(drawn=30, pictures=30, ways=10, shots=5).spec
    'zoo:omniglot-20way-5shot'
    """
    drawings = 2 * drawn > pictures
    kind = "drawings" if drawings else "photographs"
    cards = {name: card for name, card in zoo().items() if Preparation.of(card["preparation"]).draws == drawings}
    if not cards:
        raise BilevelError(f"The zoo has no model of {kind}; name a run of yours.")
    judged = {name: _judged(card) for name, card in cards.items()}
    shapes = {shape for known in judged.values() for shape in known}
    like = min(shapes, key=lambda shape: (_distance(shape[0], shape[1], ways, shots), shape))
    accuracies = {name: known[like] for name, known in judged.items() if like in known}
    good = [name for name in accuracies if accuracies[name] >= max(accuracies.values()) - CLOSE]
    trained = {name: TrainingSettings.of(cards[name]["settings"]) for name in good}
    name = min(good, key=lambda name: (_distance(trained[name].ways, trained[name].shots, ways, shots), name))
    why = (
        f"{drawn} of {pictures} pictures look like drawings, so a model of {kind} was taken. {ZOO_PREFIX}{name} is the "
        f"best one of the zoo, or within a point of it, for {like[0]}-way {like[1]}-shot episodes (meta-test: "
        f"{accuracies[name]:.1%}), which are nearest to these {ways} classes with {shots:g} labelled pictures each."
    )
    return Choice(ZOO_PREFIX + name, why)


def _judged(card: dict[str, Any]) -> dict[tuple[int, int], float]:
    """Accuracies on meta-test by ways and shots, in the batch norm mode in which the model is used."""
    mode = card["learner"].get("batch_norm")
    used = "support" if mode == "episode" else mode
    known = [Calibration.of(values) for values in card["calibrations"]]
    return {(one.ways, one.shots): one.accuracy for one in known if one.batch_norm == used}


def _distance(ways: int, shots: float, wanted_ways: int, wanted_shots: float) -> float:
    """Examples count more than classes: they decide how much a class can be known."""
    return 2 * abs(math.log(shots / wanted_shots)) + abs(math.log(ways / wanted_ways))
