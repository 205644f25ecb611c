"""A classifier made from a few labelled pictures."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bilevel.errors import BilevelError

if TYPE_CHECKING:
    from bilevel.meta.hyper_representation import HyperRepresentation


class FewShotClassifier:
    """What `learner.adapt(images, labels)` returns: the representation, and a linear classifier of its features.

    Attributes:
        classes: the labels that were given, each once, in order of appearance.
    """

    def __init__(self, learner: HyperRepresentation, images: Any, labels: Any, steps: int | None) -> None:
        self.learner, self.support = learner, as_images(images, learner.shape)
        given = list(labels.tolist() if isinstance(labels, (Tensor, np.ndarray)) else labels)
        if len(given) != len(self.support):
            raise BilevelError(f"{len(self.support)} images came with {len(given)} labels; pass one label per image.")
        self.classes: list[Hashable] = list(dict.fromkeys(given))
        if len(self.classes) < 2:
            raise BilevelError(f"All images are labelled {self.classes}; a classifier needs at least two classes.")
        number = {label: i for i, label in enumerate(self.classes)}
        self.labels = torch.tensor([[number[label] for label in given]])
        with torch.no_grad():
            features = learner.represent_sets(learner.lam, self.support, self.support, training=False)[0]
            for w in learner.iterates(features[None], self.labels, len(self.classes), steps or learner.steps):
                self.weights = w

    @torch.no_grad()
    def predict_proba(self, images: Any) -> Tensor:
        """The probability of every class, N × classes."""
        query = as_images(images, self.learner.shape)
        features = self.learner.represent_sets(self.learner.lam, self.support, query, training=False)[1]
        return torch.bmm(features[None], self.weights)[0].softmax(1)

    def predict(self, images: Any) -> list[Hashable]:
        """The most probable class of every image, as a label that was given to `adapt`."""
        return [self.classes[i] for i in self.predict_proba(images).argmax(1).tolist()]


def as_images(images: Any, shape: tuple[int, ...]) -> Tensor:
    """Pictures as the network takes them: float N×C×H×W in [0, 1].

    Bytes are taken as N×H×W×C or N×H×W, the way arrays of pictures come, and divided by 255.
    """
    channels, height, width = shape
    tensor = torch.as_tensor(np.asarray(images) if not isinstance(images, Tensor) else images)
    if tensor.dtype == torch.uint8:
        tensor = tensor[..., None] if tensor.ndim == 3 else tensor
        tensor = tensor.movedim(-1, 1).to(torch.get_default_dtype()) / 255 if tensor.ndim == 4 else tensor
    if tensor.ndim != 4 or tuple(tensor.shape[1:]) != (channels, height, width) or not tensor.is_floating_point():
        raise BilevelError(
            f"The images are {tensor.dtype} {list(tensor.shape)}; this learner takes floats N×{channels}×{height}×"
            f"{width} in [0, 1], or bytes N×{height}×{width}×{channels}."
        )
    if not len(tensor):
        raise BilevelError("There are no images.")
    return tensor
