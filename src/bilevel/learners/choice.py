"""Which model of the zoo to take: one for the kind of the pictures, trained for about as many classes and examples."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bilevel.data.preparation import Preparation
from bilevel.errors import BilevelError
from bilevel.learners import ZOO_PREFIX
from bilevel.learners.library import zoo
from bilevel.learners.settings import TrainingSettings


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
    known = {name: card for name, card in zoo().items() if Preparation.of(card["preparation"]).draws == drawings}
    fitting = {name: TrainingSettings.of(card["settings"]) for name, card in known.items()}
    if not fitting:
        raise BilevelError(f"The zoo has no model of {'drawings' if drawings else 'photographs'}; name a run of yours.")
    name = min(fitting, key=lambda name: (_distance(fitting[name], ways, shots), name))
    chosen, kind = fitting[name], "drawings" if drawings else "photographs"
    why = (
        f"{drawn} of {pictures} pictures look like drawings, so a model of {kind} was taken; of those in the zoo, "
        f"{ZOO_PREFIX}{name} was trained for episodes ({chosen.ways}-way {chosen.shots}-shot) that are nearest to "
        f"these {ways} classes with {shots:g} labelled pictures each."
    )
    return Choice(ZOO_PREFIX + name, why)


def _distance(trained: TrainingSettings, ways: int, shots: float) -> float:
    """Examples count more than classes: they decide how much a class can be known."""
    return 2 * abs(math.log(trained.shots / shots)) + abs(math.log(trained.ways / ways))
