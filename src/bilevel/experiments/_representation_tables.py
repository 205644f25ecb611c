"""The numbers of `representation`: distances between features and their map, and tables beside the paper's claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bilevel.experiments._class_names import KIN
from bilevel.experiments.base import TextTable, percent

NAMES = {"learned": "learned", "untrained": "untrained network", "pixels": "raw pixels"}
PRINTED = {"nearest": "two breeds of dog", "farthest": "dissimilar classes"}


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


def spread(values: Sequence[float]) -> dict[str, float]:
    """The mean over episodes and the half-width of its 95 % interval."""
    return {"mean": fmean(values), "interval": 1.96 * stdev(values) / len(values) ** 0.5}


def tables(numbers: Mapping[str, Any], map_ways: int, episodes: int) -> list[TextTable]:
    """The pairs, the distances and, where two classes can be kin, how often near pairs are."""
    related = [_kin(numbers, episodes)] if any(one["kin"] for one in numbers.values()) else []
    return [_pairs(numbers), _separation(numbers, map_ways, episodes), *related]


def _pairs(numbers: Mapping[str, Any]) -> TextTable:
    rows = []
    for name, one in numbers.items():
        why = "the paper shows one draw of MiniImagenet and prints no distance"
        why += "" if one["data"] == "miniimagenet" else f"; these are images of {one['data']}"
        for which, pair in ((which, pair) for draw in one["pairs"] for which, pair in draw.items()):
            classes, difference = " – ".join(pair["classes"]), _difference(which, pair, one["data"])
            sizes = f"{pair['distance']:.2f}", f"{pair['median']:.2f}"
            rows.append((name, str(pair["draw"] + 1), which, PRINTED[which], classes, difference, *sizes, why))
    columns = ("model", "draw", "pair", "paper", "ours", "difference", "distance", "median of all pairs", "why")
    title = "Nearest and farthest pair of a meta-training and a meta-test episode"
    return TextTable(title, columns, rows, prose=("paper", "difference", "why"))


def _difference(which: str, pair: Mapping[str, Any], data: str) -> str:
    if data != "miniimagenet":
        return "other data"
    if pair["kin"]:
        return "none: two dogs" if which == "nearest" else "two dogs"
    return "not two dogs" if which == "nearest" else "none: not two dogs"


def _separation(numbers: Mapping[str, Any], ways: int, episodes: int) -> TextTable:
    rows = []
    for name, one in numbers.items():
        for kind, found in one["separation"].items():
            ratio = f"{found['ratio']['mean']:.3f} ± {found['ratio']['interval']:.3f}"
            rows.append((name, NAMES[kind], ratio, _percent(found["neighbours"])))
    columns = ("model", "features", "distance between / within classes", "nearest image of the same class (per cent)")
    return TextTable(f"{ways} unseen classes, mean of {episodes} episodes ± 95 %", columns, rows)


def _kin(numbers: Mapping[str, Any], episodes: int) -> TextTable:
    rows = []
    for name, one in numbers.items():
        for kind, found in (one["kin"] or {}).items():
            shares = (_percent(found[which]) for which in ("nearest", "farthest", "any"))
            rows.append((name, KIN.get(one["data"], "of one group"), NAMES[kind], *shares))
    columns = ("model", "kin", "features", "to the nearest", "to the farthest", "to any")
    title = f"Meta-test images that are kin to an image of a meta-training episode, per cent, {episodes} draws ± 95 %"
    return TextTable(title, columns, rows)


def _percent(share: Mapping[str, float]) -> str:
    return percent(share["mean"], share["interval"], 1)


def notes(numbers: Mapping[str, Any], ways: int, drawn: bool) -> list[str]:
    found = [
        f"{name}: batch norm {one['batch_norm']['mode']}, {one['batch_norm']['meaning']}; {one['features']} features."
        for name, one in numbers.items()
    ]
    found.append(
        "Distances depend on the scale of the features, so only their ratio can be compared from row to row. A "
        f"neighbour is looked for among all other images of the {ways} classes; chance is about {100 / ways:.0f} per "
        "cent."
    )
    if drawn:
        found.append(
            "The map is t-SNE's: who is near whom means something in it, while the sizes of clusters and the distances "
            "between them do not. It shows the first of the measured episodes, and its headings give that one's "
            "numbers."
        )
    return found
