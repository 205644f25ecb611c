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
from bilevel.learners.settings import check_kind
from bilevel.training.files import packed, read_tensors

if TYPE_CHECKING:
    from bilevel.learners.base import Learner

# The most pictures that pass through the network at a time. It bounds memory.
GROUP = 200
# In the file of a saved classifier: the prefix of the learner's tensors, and the key of its description.
WEIGHTS, KIND = "weights.", "classifier"
# A temperature in a file outside of these bounds is an error.
COLDEST, HOTTEST = 1e-6, 1e6


class FewShotClassifier:
    """A classifier that `learner.adapt(images, labels)` returns.

    It holds a copy of the learner, so further training of the learner does not change the classifier.

    Attributes:
        classes: the different labels, in order of appearance.
        learner: a copy of the learner.
        steps: the number of inner steps; 1 if the learner has none.
        temperature: the number that divides the logits before the softmax; see `bilevel.learners.calibration`.
    """

    def __init__(self, learner: Learner, images: Any, labels: Any, steps: int | None) -> None:
        if steps is not None and not learner.has_steps:
            raise BilevelError(f"{learner.name} takes no inner steps; leave steps={steps} out.")
        self.learner = copy.deepcopy(learner)
        self.steps = learner.steps if steps is None else steps
        if type(self.steps) is not int or self.steps < 1:
            raise BilevelError(f"steps={steps!r:.60} is not a number of inner steps; pass a whole number ≥ 1.")
        check_kind("steps", self.steps, int)
        self.support = self._take(images)
        given = _as_labels(labels, len(self.support))
        self.classes: list[Hashable] = list(dict.fromkeys(given))
        if len(self.classes) < 2:
            raise BilevelError(
                f"All images are labelled {self.classes[0]!r}; a classifier needs images of at least two classes."
            )
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
        return torch.cat([self.logits(part) for part in self._groups(images)])

    def predict_proba(self, images: Any) -> Tensor:
        """The probability of every class, N × classes: softmax(logits / temperature)."""
        return (self.scores(images) / self.temperature).softmax(1)

    @torch.no_grad()
    def distances(self, images: Any) -> Tensor:
        """The cosine distance 1 − cos between the features of images and of the labelled images, N × labelled."""
        distances = []
        for group in self._groups(images):
            labelled, new = (F.normalize(features, dim=1) for features in self._features(group))
            distances.append(1 - new @ labelled.mT)
        return torch.cat(distances)

    @torch.no_grad()
    def class_distances(self, images: Any) -> Tensor:
        """The Euclidean distance between the features of images and the mean features of every class, N × classes."""
        return torch.cat([self._to_class_means(*self._features(group)) for group in self._groups(images)])

    @torch.no_grad()
    def scores_and_class_distances(self, images: Any) -> tuple[Tensor, Tensor]:
        """`scores` and `class_distances`, with one pass through the network where the classifier is linear."""
        if not self.learner.linear:
            return self.scores(images), self.class_distances(images)
        matrix: Tensor = self.logits.matrix  # type: ignore[attr-defined]
        scores, distances = [], []
        for group in self._groups(images):
            labelled, new = self._features(group)
            scores.append((F.pad(new, (0, 1), value=1.0).to(matrix) @ matrix).to(new))
            distances.append(self._to_class_means(labelled, new))
        return torch.cat(scores), torch.cat(distances)

    def _to_class_means(self, labelled: Tensor, new: Tensor) -> Tensor:
        counts = torch.bincount(self.numbers)
        sums = labelled.new_zeros(len(counts), labelled.shape[1])
        sums.index_add_(0, self.numbers.to(labelled.device), labelled)
        return torch.cdist(new, sums / counts[:, None].to(labelled))

    def _features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The features of the labelled images and of others, without the constant of the bias."""
        learner = self.learner
        labelled, new = learner.representation.sets(learner.lam, self.support, images, training=False)
        return labelled[:, :-1], new[:, :-1]

    def _groups(self, images: Any) -> tuple[Tensor, ...]:
        """Images in groups. In the batch norm mode "episode" they are normalised together, so there is one group."""
        query = self._take(images)
        return torch.split(query, len(query) if self.learner.batch_norm == "episode" else GROUP)

    def save(self, path: str | Path, facts: Mapping[str, Any] | None = None) -> None:
        """Write the classifier to one safetensors file: the learner, its labelled images and their classes.

        Args:
            path: the file.
            facts: other data to save with it, as JSON types.
        """
        write_bytes(Path(path), self.packed(facts))

    def packed(self, facts: Mapping[str, Any] | None = None) -> bytes:
        """The contents of the file that `save` writes."""
        wrong = next((label for label in self.classes if not isinstance(label, (str, int, float))), None)
        if wrong is not None:
            raise BilevelError(f"The class {wrong!r} cannot be written to a file. Use strings or numbers as labels.")
        pixels = (self.support * 255).round()
        exact = bool(((pixels / 255).to(self.support) == self.support).all())
        tensors = {f"{WEIGHTS}{name}": value for name, value in self.learner.with_running(self.learner.lam).items()}
        tensors |= {"images": pixels.to(torch.uint8) if exact else self.support, "labels": self.numbers}
        description = {"learner": self.learner.settings(), "classes": self.classes, "steps": self.steps}
        return packed(tensors, {**(facts or {}), KIND: {**description, "temperature": self.temperature}})

    @classmethod
    def load(cls, path: str | Path, module: nn.Module | None = None) -> tuple[FewShotClassifier, dict[str, Any]]:
        """The classifier that `save` wrote, and its `facts`. A module of your own must be passed again."""
        from bilevel import learners  # imported here to avoid a cycle: `learners.base` imports this module

        tensors, facts = read_tensors(Path(path))
        description = facts.pop(KIND, None)
        if not isinstance(description, dict):
            raise BilevelError(
                f"{path} does not hold a classifier. Pass a file that `bilevel classify … --save` or `classifier.save` "
                "wrote."
            )
        try:
            settings, classes, numbers = description["learner"], description["classes"], tensors.pop("labels")
            images, steps = tensors.pop("images"), description["steps"]
            temperature = float(description["temperature"])
            kind = learners.get(settings["name"])
            learner = kind.from_settings(settings, module)
            learner.set_weights({name.removeprefix(WEIGHTS): value for name, value in tensors.items()})
            labels = [classes[int(number)] for number in numbers]
            if not COLDEST <= temperature <= HOTTEST:
                raise ValueError(f"temperature={temperature:g} must be between {COLDEST:g} and {HOTTEST:g}")
        except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
            raise BilevelError(f"The classifier in {path} cannot be used: {error!r}. Save it again.") from error
        classifier = cls(learner, images, labels, steps if learner.has_steps else None)
        classifier.temperature = temperature
        return classifier, facts

    def predict(self, images: Any) -> list[Hashable]:
        """The most probable class of every image, as a label that was given to `adapt`."""
        return [self.classes[i] for i in self.predict_proba(images).argmax(1).tolist()]

    def _take(self, images: Any) -> Tensor:
        like = next(iter(self.learner.lam.values()), None)
        tensor = as_images(images, self.learner.shape)
        return tensor if like is None else tensor.to(like)


def as_images(images: Any, shape: tuple[int, ...]) -> Tensor:
    """Images as the input of the network: floats N×C×H×W in [0, 1].

    Bytes may be N×H×W×C, N×H×W or N×C×H×W, and are divided by 255.
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
        raise BilevelError("The array of images is empty; pass at least one image.")
    if not tensor.isfinite().all():
        raise BilevelError("The images hold values that are not finite (NaN or infinity).")
    if tensor.max() > 16 and height * width > 1:  # cached features take the place of images 1×1; any values are right
        warnings.warn(
            f"The images have values up to {float(tensor.max()):g}, and this learner takes floats in [0, 1]. Divide "
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
        # A copy, because torch warns about read-only memory, such as arrays that are mapped from files.
        return torch.from_numpy(np.array(images))
    except (TypeError, ValueError) as error:
        raise BilevelError(f"The images cannot be made into one array. Pass images of one shape. ({error})") from error


def _as_labels(labels: Any, count: int) -> list[Hashable]:
    given = list(labels.tolist() if isinstance(labels, (Tensor, np.ndarray)) else labels)
    if len(given) != count:
        raise BilevelError(f"There are {count} images and {len(given)} labels; pass one label per image.")
    wrong = next((label for label in given if not isinstance(label, Hashable)), None)
    if wrong is not None:
        raise BilevelError(f"The label {wrong!r} is not hashable; pass one string or number per image.")
    return given
