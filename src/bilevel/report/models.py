"""The episodes, filters and certificates of a trained learner, for the page."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bilevel.certificate import Certificate, certify
from bilevel.data import ImageDataset
from bilevel.data.pictures import data_url, encoded
from bilevel.errors import BilevelError
from bilevel.learners.library import TrainedLearner, find
from bilevel.learners.streams import episodes, open_data
from bilevel.plotting import class_name

if TYPE_CHECKING:
    from bilevel.report.read import FoundRun

# Only filters of the first layer with at most this many inputs are shown; others cannot be read as pictures.
MOST_FILTERS = 256
# A grey drawing of 28×28 is smallest as a PNG; a photograph as PNG would be five times what it is as JPEG.
QUALITY = 85


@dataclass(frozen=True)
class ShownQuery:
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
class ShownEpisode:
    """A meta-test episode: the classes' names, their support pictures, and the queries."""

    number: int
    classes: list[str]
    support: list[list[str]]
    queries: list[ShownQuery]

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

    trained: TrainedLearner
    layer: str
    filters: list[str]
    shape: tuple[int, ...]
    episodes: list[ShownEpisode]
    certificates: list[Certificate]
    gaps: list[float]
    missing: str = ""

    def verdict(self) -> str:
        """What the first certificate means, in a sentence or two; "" if there is none."""
        if not self.certificates:
            return ""
        certificate, l2 = self.certificates[0], self.trained.learner.l2
        if certificate.applies:
            return (
                f"The L2 term makes L strongly convex with μ = {l2:g} everywhere, so the bounds hold (Theorem 3.2): "
                f"more inner steps would change the outer objective by at most {certificate.value_gap:.3g}."
            )
        if l2 == 0 and math.isfinite(certificate.gradient_norm):
            return (
                "L has no L2 term, so it is not strongly convex: with separable classes it has no minimiser, and no "
                "distance to one can be certified. These statements hold without an L2 term: gradient descent "
                "converges if the step size is below 2/ν; ‖∇L(w_T)‖ measures the distance of w_T from a stationary "
                "point; and L(w_T) exceeds the infimum of L by at most L(w_T), because L ≥ 0. Train with --l2 above 0 "
                "for the other bounds."
            )
        return str(certificate.outcome)


class Reader:
    """Reads models for the page. A data set of several models is opened once.

    Args:
        count: meta-test episodes of each model.
        data_root: where the data are, if not in the usual place.
    """

    def __init__(self, count: int, data_root: Path | None = None) -> None:
        self.count, self.data_root = count, data_root
        self.opened: dict[tuple[Any, ...], ImageDataset] = {}

    def read(self, run: FoundRun) -> Model:
        """The model of a run. If there is none, a BilevelError says why."""
        trained = find(run.spec)
        weights = ((name, leaf) for name, leaf in trained.learner.lam.items() if leaf.ndim == 4)
        layer, weight = next(weights, ("", None))
        model = Model(
            trained,
            layer,
            [] if weight is None else filter_pictures(weight[:MOST_FILTERS]),
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
            proofs = [proof for i in range(self.count) if (proof := _certificate(trained, data, i)) is not None]
        except BilevelError as error:
            return replace(model, missing=str(error))
        return replace(
            model, episodes=shown, certificates=[proof for proof, _ in proofs], gaps=[gap for _, gap in proofs]
        )

    def _data(self, trained: TrainedLearner) -> ImageDataset:
        settings = trained.settings
        key = (settings.dataset, settings.image_size, settings.seed)
        if key not in self.opened:
            self.opened[key] = open_data(settings, self.data_root)
        trained.check_data(self.opened[key])
        return self.opened[key]


def _episode(trained: TrainedLearner, data: ImageDataset, number: int) -> ShownEpisode:
    """Episode `number` of meta-test, classified as `bilevel evaluate` classifies it: all queries in one call, because
    with batch norm's mode "episode" they are normalised together."""
    settings = trained.settings
    stream = episodes(settings, data, "test")
    task = stream.episode(number)
    (support, labels), (queries, answers) = task.train, task.val
    probabilities = trained.learner.adapt(support, labels).predict_proba(queries)
    rows, turns = stream.sampler.draw(number)
    names = [
        class_name(data.classes[int(data.labels[row])]) + (f", turned {90 * int(turn)}°" if turn else "")
        for row, turn in zip(rows[:, 0], turns, strict=True)
    ]
    drawn = [picture(image) for image in support]
    return ShownEpisode(
        number,
        names,
        [drawn[i : i + settings.shots] for i in range(0, len(drawn), settings.shots)],
        [
            ShownQuery(picture(image), int(answer), int(row.argmax()), [float(p) for p in row])
            for image, answer, row in zip(queries, answers, probabilities, strict=True)
        ],
    )


def _certificate(trained: TrainedLearner, data: ImageDataset, number: int) -> tuple[Certificate, float] | None:
    """The certificate of the inner problem of an episode, in double precision, and a bound on L(w_T) − inf L; None
    for learners that have no convex inner problem.

    The features are fixed: those of the evaluation, with its batch norm. So nothing depends on λ. μ is known: an L2
    term of weight l2 makes the curvature l2 at least; without one the cross-entropy has directions without curvature,
    and only L ≥ 0 is known.
    """
    learner = trained.learner
    found = learner.certifiable(episodes(trained.settings, data, "test").batch([number]))
    if found is None:
        return None
    problem, task = found
    lam = {"features are fixed": torch.zeros(()).double()}
    dynamics, steps, l2 = learner.dynamics, learner.steps, learner.l2
    certificate = certify(problem, lam, task, dynamics=dynamics, steps=steps, mu=l2)
    with torch.no_grad():
        w, state = problem.init(lam), dynamics.init(problem.init(lam))
        for t in range(1, steps + 1):
            w, state = dynamics.step(lambda v: problem.inner(v, lam, task.train), w, state, t)
        loss = float(problem.inner(w, lam, task.train))
    return certificate, min(loss, certificate.gradient_norm**2 / (2 * l2)) if l2 else loss


def picture(image: Tensor) -> str:
    """A data: address of one image C×H×W in [0, 1], with 1 or 3 channels; of others, the mean of the channels."""
    pixels = (image.detach().clamp(0, 1) * 255).round().byte().cpu().movedim(0, -1).numpy()
    if pixels.shape[2] == 3:
        return data_url(encoded(pixels, "JPEG", quality=QUALITY), "jpeg")
    return data_url(encoded(pixels.mean(2, keepdims=True).astype(np.uint8), optimize=True))


def filter_pictures(weight: Tensor) -> list[str]:
    """Every filter of a convolution, out×in×k×k, on one common scale.

    Of one channel: zero is middle grey, black is the most negative weight of the layer and white the most positive. Of
    three channels: the same in red, green and blue. Of others: their mean.
    """
    values = weight.detach().double().cpu().movedim(1, -1)
    if values.shape[3] not in (1, 3):
        values = values.mean(3, keepdim=True)
    bytes_ = (127.5 * (1 + values / max(float(values.abs().max()), 1e-12))).round().byte().numpy()
    return [data_url(encoded(one, optimize=True)) for one in bytes_]
