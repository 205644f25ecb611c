"""A classifier made from a few labelled pictures."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bilevel.errors import BilevelError, BilevelWarning
from bilevel.models import heads

if TYPE_CHECKING:
    from bilevel.meta.hyper_representation import HyperRepresentation

# Pictures in the network at a time, where each stands for itself; it bounds memory.
GROUP = 200


class FewShotClassifier:
    """What `learner.adapt(images, labels)` returns: the representation, and a linear classifier of its features.

    w_T comes from T gradient steps from zero on the learner's inner objective, where every class counts the same

        L(w) = mean over classes of the mean over its images of cross-entropy(h(x)ᵀw, y) + l2/2 ‖w‖²

    With as many images of each class this is the objective of an episode. Without, the plain mean would take longer
    steps for the larger classes, and with a small T the smaller ones would hardly ever be predicted.

    Learning on with the learner does not change a classifier that it made.

    Attributes:
        classes: the labels that were given, each once, in order of appearance.
        weights: w_T, features × classes; the last feature is the constant 1 of the bias.
        scale: the factor on the features that `learner.scale` gives for these images.
    """

    def __init__(self, learner: HyperRepresentation, images: Any, labels: Any, steps: int | None) -> None:
        self.learner = copy.deepcopy(learner)
        self.steps = learner.steps if steps is None else steps
        if self.steps < 1:
            raise BilevelError(f"steps={steps} would leave the classifier at zero; pass at least 1.")
        self.support = self._take(images)
        given = _as_labels(labels, len(self.support))
        self.classes: list[Hashable] = list(dict.fromkeys(given))
        if len(self.classes) < 2:
            raise BilevelError(f"All images are labelled {self.classes[0]!r}; a classifier needs at least two classes.")
        number = {label: i for i, label in enumerate(self.classes)}
        self.weights = self._fit(torch.tensor([number[label] for label in given]))

    @torch.no_grad()
    def _fit(self, labels: Tensor) -> Tensor:
        learner = self.learner
        features = learner.represent_sets(learner.lam, self.support, self.support, training=False)[0]
        counts = torch.bincount(labels).to(features.dtype)
        # The curvature of the weighted loss is that of the plain one on features weighted by the root.
        weighted = features * (len(labels) / len(counts) / counts[labels]).sqrt()[:, None]
        self.scale = learner.scale(weighted[None], len(counts)).reshape(())
        features = features * self.scale

        def inner(w: Tensor) -> Tensor:
            # torch's mean of a weighted loss divides by the sum of the weights, which is the number of classes here.
            loss = F.cross_entropy(features @ w, labels, weight=1 / counts)
            return loss + learner.l2 / 2 * w.square().sum()

        w, state = heads.zeros(1, features.shape[1], len(counts), like=features)[0], ()
        for t in range(1, self.steps + 1):
            w, state = learner.dynamics.step(inner, w, state, t)
        return w

    @torch.no_grad()
    def predict_proba(self, images: Any) -> Tensor:
        """The probability of every class, N × classes: softmax(h(x)ᵀw_T)."""
        learner, query = self.learner, self._take(images)
        # With "episode" statistics the queries are normalised together, so they cannot be taken in parts.
        size = len(query) if learner.batch_norm == "episode" else GROUP
        parts = [
            learner.represent_sets(learner.lam, self.support, part, training=False)[1] * self.scale @ self.weights
            for part in torch.split(query, size)
        ]
        return torch.cat(parts).softmax(1)

    def predict(self, images: Any) -> list[Hashable]:
        """The most probable class of every image, as a label that was given to `adapt`."""
        return [self.classes[i] for i in self.predict_proba(images).argmax(1).tolist()]

    def _take(self, images: Any) -> Tensor:
        weight = next(iter(self.learner.lam.values()))
        return as_images(images, self.learner.shape).to(weight)


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
    if tensor.max() > 16:
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
