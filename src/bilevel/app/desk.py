"""The state of the page: classes with labelled pictures, the model, and predictions for new pictures. In memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bilevel.app.desk_pictures import DONE, DeskPicture
from bilevel.data.pictures import data_url, encoded
from bilevel.data.preparation import Preparation
from bilevel.errors import BilevelError
from bilevel.learners import ZOO_PREFIX, library
from bilevel.learners.calibration import RATES
from bilevel.learners.classifier import FewShotClassifier
from bilevel.learners.library import TrainedLearner
from bilevel.learners.recognition import NoneOfThese, adapted, choose, facts_to_save, none_of_these, trained

# The value of the model setting for which a model is chosen by the pictures.
AUTOMATIC = "automatic"
# How many of the nearest labelled pictures an answer names.
NEAREST = 3
# How many changes can be undone.
UNDO = 50


@dataclass(frozen=True)
class DeskLimits:
    """The limits of a desk: classes, pictures, characters of a name, bytes of one picture and of all."""

    classes: int = 40
    pictures: int = 200
    name: int = 40
    picture_bytes: int = 12_000_000
    all_bytes: int = 200_000_000


LIMITS = DeskLimits()


@dataclass(frozen=True)
class DeskClass:
    """A class: its number, its name, and its labelled pictures by number, at least one."""

    number: int
    name: str
    pictures: dict[int, DeskPicture]


@dataclass(frozen=True)
class DeskModel:
    """The model in use, how pictures are prepared for it, and why it was chosen ("" if the user chose it)."""

    trained: TrainedLearner
    preparation: Preparation
    why: str


@dataclass(frozen=True)
class DeskClassifier:
    """The model, adapted to the labelled pictures. If `none` is None, `why_not` says why."""

    model: DeskModel
    classifier: FewShotClassifier
    pictures: list[tuple[DeskClass, int]]
    none: NoneOfThese | None
    why_not: str


class Desk:
    """Classes of labelled pictures, and predictions for new pictures. All methods are thread-safe.

    Args:
        model: `automatic`, or as for `library.find`.
        rate: the false-alarm rate of "none of these"; 0: never predict it.
    """

    def __init__(self, model: str = AUTOMATIC, rate: float = 0.05) -> None:
        self.limits = LIMITS
        self._lock = threading.RLock()
        self._numbers = count(1)
        self._classes: tuple[DeskClass, ...] = ()
        self._undo: list[tuple[DeskClass, ...]] = []
        self._models: dict[str, DeskModel] = {}
        self._adapted: DeskClassifier | None = None
        self._spec, self._rate = AUTOMATIC, 0.0
        self.choose(model, rate)

    # ------------------------------------------------------------------------------------------- labelled pictures

    def add_class(self, name: str, contents: bytes, picture_name: str = "the picture") -> int:
        """Add a class with its first labelled picture, and return the number of the class."""
        picture = self._read(contents, picture_name)
        with self._lock:
            return self._new_class(name, picture)

    def rename(self, number: int, name: str) -> None:
        with self._lock:
            old = self._class(number)
            if " ".join(name.split()) != old.name:
                self._replace(replace(old, name=self._legal(name)))

    def remove_class(self, number: int) -> None:
        with self._lock:
            gone = self._class(number)
            self._change(tuple(one for one in self._classes if one is not gone))

    def add_picture(self, number: int, contents: bytes, name: str = "the picture") -> int:
        """Add a labelled picture to a class, and return the number of the picture."""
        picture = self._read(contents, name)
        with self._lock:
            return self._place(number, picture)

    def remove_picture(self, number: int) -> None:
        """Remove a labelled picture. If it is the last one of its class, remove the class too."""
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
        """Undo the last change."""
        with self._lock:
            if not self._undo:
                raise BilevelError("There is nothing to undo.")
            self._classes = self._undo.pop()
            self._adapted = None

    def shown(self, number: int, *, seen: bool) -> bytes:
        """A labelled picture as PNG: the original, or with `seen` as the model sees it."""
        with self._lock:
            _, picture = self._picture(number)
            return encoded(picture.prepared(self._model().preparation).image) if seen else picture.shown

    def use_saved(self, model: TrainedLearner, classifier: FewShotClassifier) -> None:
        """Use a saved classifier: its model, and its labelled pictures as the model saw them."""
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
            self._undo.clear()

    # ------------------------------------------------------------------------------------------- the model

    def choose(self, model: str | None = None, rate: float | None = None) -> None:
        """Set the model (`automatic`, or as for `library.find`) and the false-alarm rate of "none of these"."""
        with self._lock:
            if rate is not None and rate not in (0, *RATES):
                rates = ", ".join(f"{rate:g}" for rate in RATES)
                raise BilevelError(f'The rate of "none of these" cannot be {rate:g}; pass 0 (never) or one of {rates}.')
            if model is not None and model != AUTOMATIC:
                self._open(model)
            self._spec = self._spec if model is None else model
            self._rate = self._rate if rate is None else rate
            self._adapted = None

    def _open(self, spec: str, why: str = "") -> DeskModel:
        if spec not in self._models:
            model = trained(spec, None)
            self._models[spec] = DeskModel(model, model.preparation, "")
        return replace(self._models[spec], why=why)

    def _model(self, also: Sequence[DeskPicture] = ()) -> DeskModel:
        """The model in use. If no picture is labelled yet, it is chosen for the pictures `also`."""
        if self._spec != AUTOMATIC:
            return self._open(self._spec)
        labelled = [picture for one in self._classes for picture in one.pictures.values()]
        examined = labelled or list(also)
        ways = max(2, len(self._classes))
        shots = len(labelled) / len(self._classes) if labelled else 1.0
        drawn = sum(picture.drawn for picture in examined) if examined else 1
        chosen = choose(drawn, max(1, len(examined)), ways, shots)
        return self._open(chosen.spec, chosen.why if labelled else "")

    def _classifier(self) -> DeskClassifier | None:
        """The classifier of the labelled pictures; None if there are fewer than two classes."""
        if len(self._classes) < 2:
            return None
        if self._adapted is None:
            model = self._model()
            images, labels, pictures = [], [], []
            for one in self._classes:
                for number, picture in one.pictures.items():
                    images.append(picture.prepared(model.preparation).image)
                    labels.append(one.name)
                    pictures.append((one, number))
            classifier = adapted(model.trained, np.stack(images), labels)
            none, why_not = None, '"None of these" is switched off.'
            if self._rate:
                try:
                    none, why_not = none_of_these(model.trained, classifier, self._rate), ""
                except BilevelError as error:
                    why_not = str(error)
            self._adapted = DeskClassifier(model, classifier, pictures, none, why_not)
        return self._adapted

    # ------------------------------------------------------------------------------------------- predictions

    def ask(self, contents: bytes, name: str = "the picture") -> dict[str, Any]:
        """The prediction for a new picture, as JSON types. The picture is not kept."""
        picture = self._read(contents, name)
        with self._lock:
            made = self._classifier()
            model = self._model([picture]) if made is None else made.model
            prepared = picture.prepared(model.preparation)
            done = [text for name, text in DONE.items() if getattr(prepared, name)]
            answer: dict[str, Any] = {
                "shown": data_url(picture.shown),
                "seen": data_url(encoded(prepared.image)),
                "light": prepared.inverted,
                "done": done,
                "blank": prepared.blank,
                "ranked": None,
            }
            return answer if made is None or prepared.blank else {**answer, **self._prediction(made, prepared.image)}

    def _prediction(self, made: DeskClassifier, image: NDArray[np.uint8]) -> dict[str, Any]:
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
        none = made.none is not None and made.none(image[None])[0]
        return {"ranked": ranked, "nearest": nearest, "none": none}

    def saved(self) -> bytes:
        """The contents of a file with the classifier, for `bilevel classify` and `bilevel app`."""
        with self._lock:
            made = self._classifier()
            if made is None:
                raise BilevelError("There is no classifier to save yet. Add labelled pictures of at least two classes.")
            return made.classifier.packed(facts_to_save(made.model.trained, made.model.preparation))

    def state(self) -> dict[str, Any]:
        """Everything that the page shows, as JSON types."""
        with self._lock:
            problem, made = "", None
            try:
                made = self._classifier()
            except BilevelError as error:  # a model may refuse this number of classes; the page must stay usable
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
                "undo": len(self._undo),
                "model": {
                    "asked": self._spec,
                    "used": model.trained.name,
                    "why": model.why,
                    "drawings": model.preparation.draws,
                    "training": f"{settings.dataset}, {settings.ways}-way {settings.shots}-shot",
                    "temperature": None if made is None else made.classifier.temperature,
                },
                "models": [
                    AUTOMATIC,
                    *(name for name in self._models if not name.startswith(ZOO_PREFIX)),
                    *(ZOO_PREFIX + name for name in library.zoo()),
                ],
                "none": {
                    "rate": self._rate,
                    "rates": [0, *RATES],
                    "why": made.none.why if made is not None and made.none is not None else "",
                    "why_not": made.why_not if made is not None else "",
                },
                "limits": vars(self.limits),
            }

    # ------------------------------------------------------------------------------------------- helpers

    def _read(self, contents: bytes, name: str) -> DeskPicture:
        if len(contents) > self.limits.picture_bytes:
            raise BilevelError(
                f"{name} has {len(contents) / 1e6:.1f} MB; a picture may have at most "
                f"{self.limits.picture_bytes / 1e6:.0f} MB."
            )
        return DeskPicture.of(contents, name)

    def _new_class(self, name: str, picture: DeskPicture) -> int:
        if len(self._classes) >= self.limits.classes:
            raise BilevelError(f"There are {self.limits.classes} classes, and no more are possible. Remove one first.")
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

    def _check_room(self, new: DeskPicture) -> None:
        pictures = [picture for one in self._classes for picture in one.pictures.values()]
        if len(pictures) >= self.limits.pictures:
            raise BilevelError(
                f"There are {self.limits.pictures} labelled pictures, and no more are possible. Remove one first."
            )
        if sum(len(picture.contents) for picture in [*pictures, new]) > self.limits.all_bytes:
            raise BilevelError(
                f"With this picture, all labelled pictures have more than {self.limits.all_bytes / 1e6:.0f} MB, which "
                "is the limit. Remove some, or add smaller ones."
            )

    def _class(self, number: int) -> DeskClass:
        for one in self._classes:
            if one.number == number:
                return one
        raise BilevelError("This class was removed. Reload the page.")

    def _picture(self, number: int) -> tuple[DeskClass, DeskPicture]:
        for one in self._classes:
            if number in one.pictures:
                return one, one.pictures[number]
        raise BilevelError("This picture was removed. Reload the page.")

    def _legal(self, name: str) -> str:
        name = " ".join(name.split())
        if not name or not name.isprintable():
            raise BilevelError("A class needs a name of letters that can be shown; write a word.")
        if len(name) > self.limits.name:
            raise BilevelError(f"The name has {len(name)} characters; write at most {self.limits.name}.")
        if name in (one.name for one in self._classes):
            raise BilevelError(f"There is a class {name} already; add the picture to it, or write another name.")
        return name

    def _replace(self, new: DeskClass) -> None:
        self._change(tuple(new if one.number == new.number else one for one in self._classes))

    def _change(self, classes: tuple[DeskClass, ...]) -> None:
        self._undo = [*self._undo, self._classes][-UNDO:]
        self._classes = classes
        self._adapted = None
