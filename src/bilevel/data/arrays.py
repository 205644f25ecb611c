"""Arrays, tensors, or any labelled torch dataset as an `ImageDataset`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bilevel.data.base import ImageDataset, Splits
from bilevel.data.splits import split_classes
from bilevel.errors import BilevelError


def from_arrays(
    images: Any,
    labels: Any,
    *,
    name: str = "arrays",
    classes: Sequence[str] | None = None,
    splits: Splits | None = None,
    seed: int = 0,
    fractions: Sequence[float] = (1.0, 0.0, 0.0),
) -> ImageDataset:
    """Images and labels that are already in memory (or memory-mapped: uint8 N×H×W×C is not copied).

    Args:
        images: N×H×W, N×H×W×C or N×C×H×W with C = 1 or 3; uint8, or floating-point within [0, 1].
        labels: N labels of any kind that sorts; class k is the k-th of their sorted values.
        name: what messages call the data.
        classes: names of the classes in that order; by default the labels themselves.
        splits: class indices of "train", "val" and "test"; by default the classes are split by `seed` and `fractions`.
        seed: the seed of the split.
        fractions: shares of the classes for train, val and test.

    >>> data = from_arrays(np.zeros((4, 3, 8, 8)), ["cat", "dog", "cat", "dog"])
    >>> data.images.shape, data.classes
    ((4, 8, 8, 3), ('cat', 'dog'))
    """
    pixels = _pixels(np.asarray(images), name)
    values, numbers = np.unique(np.asarray(labels), return_inverse=True)
    if numbers.shape != (len(pixels),):
        raise BilevelError(
            f"{name} has {len(pixels)} images and labels of shape {list(np.shape(labels))}; pass one label per image."
        )
    names = tuple(classes) if classes is not None else tuple(str(value) for value in values)
    if len(names) != len(values):
        raise BilevelError(
            f"{name} has {len(values)} different labels and {len(names)} class names; pass one for each."
        )
    chosen = splits if splits is not None else split_classes(len(values), seed, fractions)
    return ImageDataset(name, pixels, numbers.astype(np.int64), names, chosen)


def from_torch(dataset: Any, **options: Any) -> ImageDataset:
    """Any torch dataset whose items are (image, label): tensors C×H×W, arrays or pictures. It is read once, in order.

    Args:
        dataset: has a length and items.
        options: as in `from_arrays`.
    """
    images: list[NDArray[Any]] = []
    labels: list[Any] = []
    for number in range(len(dataset)):
        item = dataset[number]
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise BilevelError(
                f"Item {number} of the dataset is a {type(item).__name__}; items must be (image, label)."
            )
        image = np.asarray(item[0])
        if images and image.shape != images[0].shape:
            raise BilevelError(
                f"Item {number} of the dataset has shape {list(image.shape)} and item 0 {list(images[0].shape)}; "
                "resize them to one size with the dataset's transform."
            )
        images.append(image)
        labels.append(item[1].item() if hasattr(item[1], "item") else item[1])
    if not images:
        raise BilevelError("The dataset is empty; pass one with at least one (image, label).")
    names = getattr(dataset, "classes", None)
    if "classes" not in options and isinstance(names, (list, tuple)) and all(type(label) is int for label in labels):
        options["classes"] = [str(names[label]) for label in sorted(set(labels))]
    return from_arrays(np.stack(images), labels, **{"name": type(dataset).__name__, **options})


def _pixels(images: NDArray[Any], name: str) -> NDArray[np.uint8]:
    if images.ndim == 3:
        images = images[..., None]
    elif images.ndim == 4 and images.shape[-1] not in (1, 3) and images.shape[1] in (1, 3):
        images = images.transpose(0, 2, 3, 1)
    if images.ndim != 4 or images.shape[-1] not in (1, 3):
        raise BilevelError(
            f"images of {name} have shape {list(images.shape)}; pass N×H×W, N×H×W×C or N×C×H×W with C = 1 or 3."
        )
    if images.dtype == np.uint8:
        return images
    if images.dtype == np.bool_:
        return images.astype(np.uint8) * 255
    if not np.issubdtype(images.dtype, np.floating):
        raise BilevelError(f"images of {name} are {images.dtype}; pass uint8 0…255 or floating-point 0…1.")
    if images.size and not (images.min() >= 0 and images.max() <= 1):
        raise BilevelError(
            f"images of {name} go from {images.min():.3g} to {images.max():.3g}; pass floating-point images within [0, "
            "1] (normalise in the model, not in the data), or uint8."
        )
    return np.rint(images * 255).astype(np.uint8)
