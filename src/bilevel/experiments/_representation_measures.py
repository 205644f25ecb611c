"""Distances between features, and their map: the mathematics of `representation`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Separation:
    """Distances of one set of images.

    Attributes:
        within: the mean over all pairs of images of one class.
        between: the mean over all pairs of images of two classes.
        neighbours: the share of images whose nearest other image is of their class.
    """

    within: float
    between: float
    neighbours: float

    @property
    def ratio(self) -> float:
        return self.between / self.within


def distances(one: Tensor, other: Tensor) -> Tensor:
    """‖a − b‖ for every row a of one and b of the other, from ‖a‖² + ‖b‖² − 2aᵀb: for photographs, many times faster
    than from differences, and in double precision as good."""
    return torch.cdist(one.double(), other.double(), compute_mode="use_mm_for_euclid_dist")


def extremes(table: Tensor) -> dict[str, tuple[int, int]]:
    """The row and the column of the smallest and of the largest distance."""
    width = table.shape[1]
    return {
        "nearest": divmod(int(table.argmin()), width),
        "farthest": divmod(int(table.argmax()), width),
    }


def separation(features: Tensor, labels: Tensor) -> Separation:
    """Distances between and within classes."""
    table = distances(features, features)
    same = labels[:, None] == labels
    others = ~torch.eye(len(labels), dtype=torch.bool)
    nearest = table.masked_fill(~others, torch.inf).argmin(1)
    return Separation(
        float(table[same & others].mean()),
        float(table[~same].mean()),
        float((labels[nearest] == labels).double().mean()),
    )


def flatten(features: Tensor, perplexity: float, seed: int) -> NDArray[Any]:
    """t-SNE's map of the features in two dimensions, the same for any number of cores."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    # From principal components, so that the map keeps what it can of the large distances. Its sums depend on how many
    # threads share them.
    with threadpool_limits(1):
        shrunk = TSNE(perplexity=perplexity, init="pca", learning_rate="auto", random_state=seed, n_jobs=1)
        return np.asarray(shrunk.fit_transform(features.numpy()), dtype=float)
