"""A classifier made from a few labelled pictures."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bilevel.errors import BilevelError, BilevelWarning
from bilevel.files import write_bytes
from bilevel.training.files import packed, read_tensors

if TYPE_CHECKING:
    from bilevel.learners.base import Learner

# Pictures in the network at a time, where each stands for itself; it bounds memory.
GROUP = 200
# In a saved classifier: the prefix of the learner's tensors, and the key of what describes it.
WEIGHTS, KIND = "weights.", "classifier"
# Temperatures in a file that can be meant.
COLDEST, HOTTEST = 1e-6, 1e6


class FewShotClassifier:
    """What `learner.adapt(images, labels)` returns: a classifier of the classes that were given.

    Learning on with the learner does not change a classifier that it made.

    Attributes:
        classes: the labels that were given, each once, in order of appearance.
        learner: a copy of the learner.
        steps: the inner steps that were taken; 1 where a learner takes none.
        temperature: by which logits are divided for probabilities; see `bilevel.learners.calibration`.
    """

    def __init__(self, learner: Learner, images: Any, labels: Any, steps: int | None) -> None:
        if steps is not None and not learner.has_steps:
            raise BilevelError(f"{learner.name} takes no inner steps; leave steps={steps} out.")
        self.learner = copy.deepcopy(learner)
        self.steps = learner.steps if steps is None else steps
        if type(self.steps) is not int or self.steps < 1:
            raise BilevelError(f"steps={steps!r:.60} would leave the classifier at zero; pass at least 1.")
        self.support = self._take(images)
        given = _as_labels(labels, len(self.support))
        self.classes: list[Hashable] = list(dict.fromkeys(given))
        if len(self.classes) < 2:
            raise BilevelError(f"All images are labelled {self.classes[0]!r}; a classifier needs at least two classes.")
        number = {label: i for i, label in enumerate(self.classes)}
        self.numbers = numbers = torch.tensor([number[label] for label in given])
        self.temperature = 1.0
        self.learner.check_episode(len(self.classes), int(torch.bincount(numbers).max()))
        with torch.no_grad():
            self.logits = self.learner.adapted(
                self.support, numbers.to(self.support.device), len(self.classes), self.steps
            )

    @torch.no_grad()
    def scores(self, images: Any) -> Tensor:
        """The learner's logits, N × classes."""
        query = self._take(images)
        # With "episode" statistics the queries are normalised together, so they cannot be taken in parts.
        size = len(query) if self.learner.batch_norm == "episode" else GROUP
        return torch.cat([self.logits(part) for part in torch.split(query, size)])

    def predict_proba(self, images: Any) -> Tensor:
        """The probability of every class, N × classes: the softmax of the learner's logits over the temperature."""
        return (self.scores(images) / self.temperature).softmax(1)

    @torch.no_grad()
    def distances(self, images: Any) -> Tensor:
        """How far images are from the labelled ones in the representation, N × labelled: 1 − cosine of the features."""
        learner = self.learner
        sets = learner.representation.sets(learner.lam, self.support, self._take(images), training=False)
        known, asked = (F.normalize(features[:, :-1], dim=1) for features in sets)  # without the bias's constant
        return 1 - asked @ known.mT

    def save(self, path: str | Path, facts: Mapping[str, Any] | None = None) -> None:
        """Write the classifier to one safetensors file: the learner, its labelled images and their classes.

        Args:
            path: of the file.
            facts: whatever else should be kept, in JSON's types.
        """
        write_bytes(Path(path), self.packed(facts))

    def packed(self, facts: Mapping[str, Any] | None = None) -> bytes:
        """The content of the file that `save` writes."""
        wrong = next((label for label in self.classes if not isinstance(label, (str, int, float))), None)
        if wrong is not None:
            raise BilevelError(f"The class {wrong!r} cannot be written to a file; label images by texts or numbers.")
        pixels = (self.support * 255).round()
        exact = bool(((pixels / 255).to(self.support) == self.support).all())
        kept = {f"{WEIGHTS}{name}": value for name, value in self.learner.with_running(self.learner.lam).items()}
        kept |= {"images": pixels.to(torch.uint8) if exact else self.support, "labels": self.numbers}
        about = {"learner": self.learner.settings(), "classes": self.classes, "steps": self.steps}
        return packed(kept, {**(facts or {}), KIND: {**about, "temperature": self.temperature}})

    @classmethod
    def load(cls, path: str | Path, module: nn.Module | None = None) -> tuple[FewShotClassifier, dict[str, Any]]:
        """The classifier that `save` wrote, and the facts beside it; a module of your own has to be passed again."""
        from bilevel import learners  # imported here, because the contract of learners imports this module

        tensors, facts = read_tensors(Path(path))
        about = facts.pop(KIND, None)
        if not isinstance(about, dict):
            raise BilevelError(f"{path} is no classifier that `bilevel classify … --save` or `classifier.save` wrote.")
        try:
            settings, classes, numbers = about["learner"], about["classes"], tensors.pop("labels")
            images, temperature, steps = tensors.pop("images"), float(about["temperature"]), about["steps"]
            kind = learners.get(settings["name"])
            learner = kind.from_settings(settings, module)
            learner.set_weights({name.removeprefix(WEIGHTS): value for name, value in tensors.items()})
            labels = [classes[int(number)] for number in numbers]
            if not COLDEST <= temperature <= HOTTEST:
                raise ValueError(f"no logits can be divided by a temperature of {temperature:g}")
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise BilevelError(f"The classifier in {path} is incomplete: {error!r}. Save it again.") from error
        made = cls(learner, images, labels, steps if learner.has_steps else None)
        made.temperature = temperature
        return made, facts

    def predict(self, images: Any) -> list[Hashable]:
        """The most probable class of every image, as a label that was given to `adapt`."""
        return [self.classes[i] for i in self.predict_proba(images).argmax(1).tolist()]

    def _take(self, images: Any) -> Tensor:
        like = next(iter(self.learner.lam.values()), None)
        taken = as_images(images, self.learner.shape)
        return taken if like is None else taken.to(like)


def as_images(images: Any, shape: tuple[int, ...]) -> Tensor:
    """Pictures as the network takes them: float N×C×H×W in [0, 1].

    Bytes are taken as N×H×W×C or N×H×W, the way arrays of pictures come, or N×C×H×W, and divided by 255.
    """
    tensor = _as_tensor(images)
    if tensor.dtype == torch.uint8 and tensor.ndim in (3, 4):
        tensor = tensor[..., None] if tensor.ndim == 3 else tensor
        tensor = tensor if tuple(tensor.shape[1:]) == shape else tensor.movedim(-1, 1)
        tensor = tensor.to(torch.get_default_dtype()) / 255
    channels, height, width = shape
    if tensor.ndim != 4 or tuple(tensor.shape[1:]) != shape or not tensor.is_floating_point():
        raise BilevelError(
            f"The images are {tensor.dtype} {list(tensor.shape)}; this learner takes floats N×{channels}×{height}×"
            f"{width} in [0, 1], or bytes N×{height}×{width}×{channels}."
        )
    if not len(tensor):
        raise BilevelError("There are no images.")
    if not tensor.isfinite().all():
        raise BilevelError("The images hold values that are not finite (NaN or infinity).")
    if tensor.max() > 16 and height * width > 1:  # features that stand for pictures have any size
        warnings.warn(
            f"The images' values go up to {float(tensor.max()):g}, and this learner takes floats in [0, 1]; divide "
            "them by 255, or pass bytes.",
            BilevelWarning,
            stacklevel=5,
        )
    return tensor


def _as_tensor(images: Any) -> Tensor:
    if isinstance(images, Tensor):
        return images.detach()
    if isinstance(images, (list, tuple)) and images and isinstance(images[0], Tensor):
        images = [image.detach().cpu().numpy() for image in images]
    try:
        # A copy, because arrays are often mapped from files, and torch warns about memory it may not write to.
        return torch.from_numpy(np.array(images))
    except (TypeError, ValueError) as error:
        raise BilevelError(f"The images do not make one array: {error}.") from error


def _as_labels(labels: Any, count: int) -> list[Hashable]:
    given = list(labels.tolist() if isinstance(labels, (Tensor, np.ndarray)) else labels)
    if len(given) != count:
        raise BilevelError(f"{count} images came with {len(given)} labels; pass one label per image.")
    wrong = next((label for label in given if not isinstance(label, Hashable)), None)
    if wrong is not None:
        raise BilevelError(f"The label {wrong!r} is no single value; pass one string or number per image.")
    return given
