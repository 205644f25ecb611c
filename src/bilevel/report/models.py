"""What a trained learner does with classes it has never seen, and what can be said about it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bilevel.certificate import Certificate, certify
from bilevel.data import ImageDataset
from bilevel.errors import BilevelError
from bilevel.meta.library import Trained, find
from bilevel.meta.training import episodes, open_data
from bilevel.problem import Problem, Task
from bilevel.report import pictures

if TYPE_CHECKING:
    from bilevel.report.read import FoundRun

OpenData = Callable[[Any], ImageDataset]
# Filters of more than this many inputs are too wide to be looked at, and layers behind the first mean nothing as such.
MOST_FILTERS = 256


@dataclass(frozen=True)
class Query:
    """A picture to be classified: its class, the most probable class, and every class's probability."""

    picture: str
    answer: int
    predicted: int
    probabilities: list[float]

    @property
    def right(self) -> bool:
        return self.answer == self.predicted

    @property
    def probability(self) -> float:
        return self.probabilities[self.predicted]

    @property
    def rounded(self) -> str:
        return " ".join(f"{p:.4f}" for p in self.probabilities)


@dataclass(frozen=True)
class Shown:
    """A meta-test episode: the classes' names, their support pictures, and the queries."""

    number: int
    classes: list[str]
    support: list[list[str]]
    queries: list[Query]

    @property
    def right(self) -> int:
        return sum(query.right for query in self.queries)


@dataclass(frozen=True)
class Model:
    """What the page shows of a learner.

    Attributes:
        layer: the name of the first convolution, with its `filters` as pictures.
        gaps: for every certificate, a bound on L(w_T) − inf L.
        missing: why there are no episodes and no certificates, if there are none.
    """

    trained: Trained
    layer: str
    filters: list[str]
    shape: tuple[int, ...]
    episodes: list[Shown]
    certificates: list[Certificate]
    gaps: list[float]
    missing: str = ""


class Reader:
    """Models one by one; the data sets that several were trained on are opened once.

    Args:
        count: meta-test episodes of each model.
        data_root: where the data are, if not in the usual place.
    """

    def __init__(self, count: int, data_root: Path | None = None) -> None:
        self.count, self.data_root = count, data_root
        self.opened: dict[tuple[Any, ...], ImageDataset] = {}

    def read(self, run: FoundRun) -> Model:
        """The model of a run; a BilevelError says why there is none."""
        trained = find(run.spec)
        layer, weight = _first_convolution(trained)
        model = Model(
            trained,
            layer,
            [] if weight is None else pictures.filters(weight[:MOST_FILTERS]),
            () if weight is None else tuple(weight.shape),
            [],
            [],
            [],
        )
        if not self.count:
            return replace(model, missing="No episodes were asked for.")
        try:
            data = self._data(trained)
            shown = [_episode(trained, data, i) for i in range(self.count)]
            proofs = [_certificate(trained, data, i) for i in range(self.count)]
        except BilevelError as error:
            return replace(model, missing=str(error))
        return replace(
            model, episodes=shown, certificates=[proof for proof, _ in proofs], gaps=[gap for _, gap in proofs]
        )

    def _data(self, trained: Trained) -> ImageDataset:
        settings = trained.settings
        key = (settings.dataset, settings.image_size, settings.seed)
        if key not in self.opened:
            self.opened[key] = open_data(settings, self.data_root)
        data = self.opened[key]
        known = trained.card.get("data", {})
        trained_on = known.get("fingerprint") if isinstance(known, dict) else None
        if trained_on not in (None, data.fingerprint):
            raise BilevelError(
                f"The images of {data.name} here are not those that {trained.name} was trained on, so classes that it "
                "was trained on may be among those of the test."
            )
        return data


def _first_convolution(trained: Trained) -> tuple[str, torch.Tensor | None]:
    return next(((name, value) for name, value in trained.learner.lam.items() if value.ndim == 4), ("", None))


def _episode(trained: Trained, data: ImageDataset, number: int) -> Shown:
    """Episode `number` of meta-test, classified as `bilevel evaluate` classifies it: all queries in one call, because
    with batch norm's mode "episode" they are normalised together."""
    settings = trained.settings
    stream = episodes(settings, data, "test")
    task = stream.episode(number)
    (support, labels), (queries, answers) = task.train, task.val
    probabilities = trained.learner.adapt(support, labels).predict_proba(queries)
    rows, turns = stream.sampler.draw(number)
    names = [
        readable(data.classes[int(data.labels[row])]) + (f", turned {90 * int(turn)}°" if turn else "")
        for row, turn in zip(rows[:, 0], turns, strict=True)
    ]
    drawn = [pictures.picture(image) for image in support]
    return Shown(
        number,
        names,
        [drawn[i : i + settings.shots] for i in range(0, len(drawn), settings.shots)],
        [
            Query(pictures.picture(image), int(answer), int(row.argmax()), [float(p) for p in row])
            for image, answer, row in zip(queries, answers, probabilities, strict=True)
        ],
    )


def _certificate(trained: Trained, data: ImageDataset, number: int) -> tuple[Certificate, float]:
    """What `certify` says of the classifier of an episode, in double precision, and a bound on L(w_T) − inf L.

    The features are those of the evaluation, with its batch norm, and fixed; so λ enters nothing. μ is known: an L2
    term of weight l2 makes the curvature l2 at least, and without one the cross-entropy has directions without any.
    What then remains is that L is never below 0.
    """
    learner, settings = trained.learner, trained.settings
    (images, labels), (queries, answers) = (lambda task: (task.train, task.val))(
        episodes(settings, data, "test").batch([number])
    )
    with torch.no_grad():
        features = learner.represent_episodes(learner.lam, images, queries, settings.ways, training=False)
        support, query = (part.double() for part in features)
    whole = learner.problem(1, settings.ways)
    fixed = Problem(whole.inner, whole.outer, whole.init)
    lam = {"features are fixed": support.new_zeros(())}
    task = Task((support, labels), (query, answers))
    found = certify(fixed, lam, task, dynamics=learner.dynamics, steps=learner.steps, mu=learner.l2)
    with torch.no_grad():
        w, state = fixed.init(lam), learner.dynamics.init(fixed.init(lam))
        for t in range(1, learner.steps + 1):
            w, state = learner.dynamics.step(lambda v: fixed.inner(v, lam, task.train), w, state, t)
        loss = float(fixed.inner(w, lam, task.train))
    return found, min(loss, found.gradient_norm**2 / (2 * learner.l2)) if learner.l2 else loss


def verdict(certificate: Certificate, l2: float) -> str:
    """What a reader may conclude, in a sentence or two."""
    if certificate.applies:
        return (
            f"The L2 term makes L strongly convex with μ = {l2:g} everywhere, so the bounds hold (Theorem 3.2): more "
            f"inner steps would change the outer objective by at most {certificate.value_gap:.3g}."
        )
    if l2 == 0 and math.isfinite(certificate.gradient_norm):
        return (
            "L has no L2 term, so it is not strongly convex: with separable classes it has no minimiser at all, and no "
            "distance to one can be certified. What holds without it: the step size is to be compared with 2/ν; "
            "‖∇L(w_T)‖ says how far from rest the steps stopped; and as L is never below 0, it "
            "is above its infimum by no more than its value. A training with --l2 above 0 gets the other bounds."
        )
    return str(certificate.outcome)


def readable(title: str) -> str:
    """The name of a class as one would say it.

    >>> readable("hebrew/U+05D0 HEBREW LETTER ALEF"), readable("Tengwar/character07")
    ('hebrew alef', 'Tengwar character07')
    """
    name = title.partition("/U+")[2].partition(" ")[2].lower() or title
    return name.replace(" letter ", " ").replace("/", " ")
