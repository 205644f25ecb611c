"""What is on the page: classes with their pictures, the model, and what it says about new pictures. All in memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bilevel.app.desk_pictures import DONE, DeskPicture, data_url, png
from bilevel.data.preparation import Preparation
from bilevel.errors import BilevelError
from bilevel.learners import ZOO_PREFIX, choice, library
from bilevel.learners.calibration import RATES
from bilevel.learners.classifier import FewShotClassifier
from bilevel.learners.library import TrainedLearner
from bilevel.learners.recognition import NoneOfThese, adapted, facts_to_keep, none_of_these, trained

# The name of the choice of a model by the pictures.
AUTOMATIC = "automatic"
# Labelled pictures that an answer names as the nearest.
NEAREST = 3
# Changes that can be taken back.
UNDO = 50


@dataclass(frozen=True)
class DeskLimits:
    """How much may lie on the desk: the numbers of classes and of pictures, characters of a name, bytes."""

    classes: int = 40
    pictures: int = 200
    name: int = 40
    picture_bytes: int = 12_000_000
    all_bytes: int = 200_000_000


LIMITS = DeskLimits()


@dataclass(frozen=True)
class DeskClass:
    """A class: its number, its name and its labelled pictures by number, one at least."""

    number: int
    name: str
    pictures: dict[int, DeskPicture]


@dataclass(frozen=True)
class DeskModel:
    """The model in use, how pictures are prepared for it, and why it was chosen ("" where the user chose it)."""

    trained: TrainedLearner
    preparation: Preparation
    why: str


@dataclass(frozen=True)
class DeskClassifier:
    """The model adapted to the labelled pictures; `why_not` says why there is no `none`, if there is none."""

    model: DeskModel
    classifier: FewShotClassifier
    pictures: list[tuple[DeskClass, int]]
    none: NoneOfThese | None
    why_not: str


class Desk:
    """Classes of labelled pictures, and answers about new ones. Every method may be called from any thread.

    Args:
        model: `automatic`, or as for `library.find`.
        rate: the false-alarm rate of "none of these"; 0: never say it.
    """

    def __init__(self, model: str = AUTOMATIC, rate: float = 0.05) -> None:
        self.limits = LIMITS
        self._lock = threading.RLock()
        self._numbers = count(1)
        self._classes: tuple[DeskClass, ...] = ()
        self._before: list[tuple[DeskClass, ...]] = []
        self._models: dict[str, DeskModel] = {}
        self._made: DeskClassifier | None = None
        self._spec, self._rate = AUTOMATIC, 0.0
        self.choose(model, rate)

    # ------------------------------------------------------------------------------------------- what lies on it

    def add_class(self, name: str, contents: bytes, picture_name: str = "the picture") -> int:
        """A new class with its first labelled picture; its number."""
        picture = self._read(contents, picture_name)
        with self._lock:
            return self._new_class(name, picture)

    def rename(self, number: int, name: str) -> None:
        with self._lock:
            old = self._class(number)
            if name.strip() != old.name:
                self._replace(replace(old, name=self._legal(name)))

    def remove_class(self, number: int) -> None:
        with self._lock:
            gone = self._class(number)
            self._change(tuple(one for one in self._classes if one is not gone))

    def add_picture(self, number: int, contents: bytes, name: str = "the picture") -> int:
        """A labelled picture of a class; its number."""
        picture = self._read(contents, name)
        with self._lock:
            return self._place(number, picture)

    def remove_picture(self, number: int) -> None:
        """Take a labelled picture away, and its class with the last one."""
        with self._lock:
            owner, _ = self._picture(number)
            rest = {n: p for n, p in owner.pictures.items() if n != number}
            if rest:
                self._replace(replace(owner, pictures=rest))
            else:
                self.remove_class(owner.number)

    def clear(self) -> None:
        with self._lock:
            if self._classes:
                self._change(())

    def undo(self) -> None:
        """Take the last change back."""
        with self._lock:
            if not self._before:
                raise BilevelError("There is nothing to undo.")
            self._classes = self._before.pop()
            self._made = None

    def shown(self, number: int, *, seen: bool) -> bytes:
        """A PNG of a labelled picture: as it is, or as the model sees it."""
        with self._lock:
            _, picture = self._picture(number)
            return png(picture.prepared(self._model().preparation).image) if seen else picture.shown

    def keep(self, model: TrainedLearner, classifier: FewShotClassifier) -> None:
        """Begin with a classifier that was saved: its model, and its labelled pictures as the model saw them."""
        with self._lock:
            self._models[model.name] = DeskModel(model, model.preparation, "")
            self._spec = model.name
            images = (classifier.support * 255).round().clamp(0, 255).byte().movedim(1, -1).contiguous().numpy()
            numbers: dict[int, int] = {}
            for place, (image, label) in enumerate(zip(images, classifier.numbers.tolist(), strict=True), start=1):
                picture = DeskPicture.seen_by(model.preparation, image, f"picture {place}")
                if label in numbers:
                    self._place(numbers[label], picture)
                else:
                    numbers[label] = self._new_class(str(classifier.classes[label]), picture)
            self._before.clear()

    # ------------------------------------------------------------------------------------------- the model

    def choose(self, model: str | None = None, rate: float | None = None) -> None:
        """Take another model (`automatic`, or as for `library.find`), or another rate of "none of these"."""
        with self._lock:
            if rate is not None and rate not in (0, *RATES):
                raise BilevelError(
                    f'The rate of "none of these" cannot be {rate:g}; take 0 (never) or one of {_listed(RATES)}.'
                )
            if model is not None and model != AUTOMATIC:
                self._open(model)
            self._spec = self._spec if model is None else model
            self._rate = self._rate if rate is None else rate
            self._made = None

    def _open(self, spec: str, why: str = "") -> DeskModel:
        if spec not in self._models:
            found = trained(spec, None)
            self._models[spec] = DeskModel(found, found.preparation, "")
        return replace(self._models[spec], why=why)

    def _model(self, also: Sequence[DeskPicture] = ()) -> DeskModel:
        """The model in use; `also` are pictures that have a say where none are labelled yet."""
        if self._spec != AUTOMATIC:
            return self._open(self._spec)
        labelled = [picture for one in self._classes for picture in one.pictures.values()]
        looked_at = labelled or list(also)
        ways = max(2, len(self._classes))
        shots = len(labelled) / len(self._classes) if labelled else 1.0
        drawn = sum(picture.drawn for picture in looked_at) if looked_at else 1
        chosen = choice.choose(drawn, max(1, len(looked_at)), ways, shots)
        return self._open(chosen.spec, chosen.why if labelled else "")

    def _classifier(self) -> DeskClassifier | None:
        """The classifier of what lies on the desk; None with fewer than two classes."""
        if len(self._classes) < 2:
            return None
        if self._made is None:
            model = self._model()
            images, labels, pictures = [], [], []
            for one in self._classes:
                for number, picture in one.pictures.items():
                    images.append(picture.prepared(model.preparation).image)
                    labels.append(one.name)
                    pictures.append((one, number))
            classifier = adapted(model.trained, np.stack(images), labels)
            none, why_not = None, 'The page was told never to say "none of these".'
            if self._rate:
                try:
                    none, why_not = none_of_these(model.trained, classifier, self._rate), ""
                except BilevelError as error:
                    why_not = str(error)
            self._made = DeskClassifier(model, classifier, pictures, none, why_not)
        return self._made

    # ------------------------------------------------------------------------------------------- answers

    def ask(self, contents: bytes, name: str = "the picture") -> dict[str, Any]:
        """What is on a new picture, in JSON's types; the picture is not kept."""
        picture = self._read(contents, name)
        with self._lock:
            made = self._classifier()
            model = self._model([picture]) if made is None else made.model
            prepared = picture.prepared(model.preparation)
            done = [text for name, text in DONE.items() if getattr(prepared, name)]
            answer: dict[str, Any] = {
                "shown": data_url(picture.shown),
                "seen": data_url(png(prepared.image)),
                "light": prepared.inverted,
                "done": done,
                "blank": prepared.blank,
                "ranked": None,
            }
            return answer if made is None or prepared.blank else {**answer, **self._said(made, prepared.image)}

    def _said(self, made: DeskClassifier, image: NDArray[np.uint8]) -> dict[str, Any]:
        classifier = made.classifier
        scores = classifier.scores(image[None])
        probabilities = (scores / classifier.temperature).softmax(1)[0].tolist()
        numbers = {one.name: one.number for one, _ in made.pictures}
        ranked = [
            {"class": numbers[str(name)], "name": name, "probability": p}
            for name, p in zip(classifier.classes, probabilities, strict=True)
        ]
        ranked.sort(key=lambda one: -one["probability"])
        distances = classifier.distances(image[None])[0]
        nearest = [
            {"class": made.pictures[i][0].number, "picture": made.pictures[i][1], "distance": float(distances[i])}
            for i in distances.argsort()[:NEAREST].tolist()
        ]
        none = made.none is not None and made.none(scores)[0]
        return {"ranked": ranked, "nearest": nearest, "none": none}

    def saved(self) -> bytes:
        """The classifier as a file that `bilevel classify` and `bilevel app` take."""
        with self._lock:
            made = self._classifier()
            if made is None:
                raise BilevelError("There is no classifier to save yet; it needs two classes.")
            return made.classifier.packed(facts_to_keep(made.model.trained, made.model.preparation))

    def state(self) -> dict[str, Any]:
        """Everything that the page shows, in JSON's types."""
        with self._lock:
            problem, made = "", None
            try:
                made = self._classifier()
            except BilevelError as error:  # a model may refuse so many classes; the page must stay usable
                problem = str(error)
            model = self._model() if made is None else made.model
            classes = [
                {
                    "number": one.number,
                    "name": one.name,
                    "pictures": [
                        {"number": n, "name": p.name, "light": p.drawn and p.prepared(model.preparation).inverted}
                        for n, p in one.pictures.items()
                    ],
                }
                for one in self._classes
            ]
            settings = model.trained.settings
            return {
                "classes": classes,
                "ready": made is not None,
                "problem": problem,
                "undo": len(self._before),
                "model": {
                    "asked": self._spec,
                    "used": model.trained.name,
                    "why": model.why,
                    "drawings": model.preparation.draws,
                    "training": f"{settings.dataset}, {settings.ways}-way {settings.shots}-shot",
                    "temperature": None if made is None else made.classifier.temperature,
                },
                "models": [AUTOMATIC, *dict.fromkeys([*self._own(), *(ZOO_PREFIX + name for name in library.zoo())])],
                "none": {
                    "rate": self._rate,
                    "rates": [0, *RATES],
                    "why": made.none.why if made is not None and made.none is not None else "",
                    "why_not": made.why_not if made is not None else "",
                },
                "limits": vars(self.limits),
            }

    # ------------------------------------------------------------------------------------------- parts

    def _own(self) -> list[str]:
        return [name for name in self._models if not name.startswith(ZOO_PREFIX)]

    def _read(self, contents: bytes, name: str) -> DeskPicture:
        if len(contents) > self.limits.picture_bytes:
            raise BilevelError(
                f"{name} has {len(contents) / 1e6:.1f} MB; a picture may have {self.limits.picture_bytes / 1e6:.0f} MB."
            )
        return DeskPicture.of(contents, name)

    def _new_class(self, name: str, picture: DeskPicture) -> int:
        if len(self._classes) >= self.limits.classes:
            raise BilevelError(f"There are {self.limits.classes} classes already, which is the most.")
        self._check_room(picture)
        new = DeskClass(next(self._numbers), self._legal(name), {next(self._numbers): picture})
        self._change((*self._classes, new))
        return new.number

    def _place(self, number: int, picture: DeskPicture) -> int:
        owner = self._class(number)
        self._check_room(picture)
        new = next(self._numbers)
        self._replace(replace(owner, pictures={**owner.pictures, new: picture}))
        return new

    def _check_room(self, picture: DeskPicture) -> None:
        there = [known for one in self._classes for known in one.pictures.values()]
        if len(there) >= self.limits.pictures:
            raise BilevelError(f"There are {self.limits.pictures} labelled pictures already, which is the most.")
        if sum(len(known.contents) for known in there) + len(picture.contents) > self.limits.all_bytes:
            raise BilevelError(f"The labelled pictures would have more than {self.limits.all_bytes / 1e6:.0f} MB.")

    def _class(self, number: int) -> DeskClass:
        found = next((one for one in self._classes if one.number == number), None)
        if found is None:
            raise BilevelError("This class is no longer on the page; reload it.")
        return found

    def _picture(self, number: int) -> tuple[DeskClass, DeskPicture]:
        for one in self._classes:
            if number in one.pictures:
                return one, one.pictures[number]
        raise BilevelError("This picture is no longer on the page; reload it.")

    def _legal(self, name: str) -> str:
        name = " ".join(name.split())
        if not name or not name.isprintable():
            raise BilevelError("A class needs a name; write a word.")
        if len(name) > self.limits.name:
            raise BilevelError(f"The name has {len(name)} characters; write at most {self.limits.name}.")
        if name in (one.name for one in self._classes):
            raise BilevelError(f"There is a class {name} already; add the picture to it, or take another name.")
        return name

    def _replace(self, new: DeskClass) -> None:
        self._change(tuple(new if one.number == new.number else one for one in self._classes))

    def _change(self, classes: tuple[DeskClass, ...]) -> None:
        self._before = [*self._before, self._classes][-UNDO:]
        self._classes = classes
        self._made = None


def _listed(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in rates)
