"""The pictures of a representation: pairs of images with their features, and maps of unseen classes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from bilevel.experiments._class_names import readable
from bilevel.plotting import BLACK, BLUE, COLOURS, GREEN, GREY, Axes, picture, show_image

# A class has a colour and a shape, so that more classes than colours can be distinguished.
CLASS_COLOURS = (*COLOURS, BLACK)
SHAPES = "os^DvP"
# The side of a thumbnail, as a share of the map's.
THUMBNAIL = 0.075
# How far a thumbnail would go, as a share of the map's side, to uncover one more point.
COVERED = 0.02


@dataclass(frozen=True)
class ImagePair:
    """An image of D and one of D′, in this order everywhere.

    Attributes:
        draw: which D and D′.
        numbers: which of their images.
        titles: the classes, as the data set calls them.
        images: height × width × channels, from 0 to 1.
        components: the numbers of the features that are shown, and `values` their values.
        distance: the distance of all features.
        median: the median distance of all pairs in this draw.
    """

    draw: int
    numbers: tuple[int, int]
    titles: tuple[str, str]
    images: tuple[NDArray[Any], NDArray[Any]]
    components: list[int]
    values: tuple[NDArray[Any], NDArray[Any]]
    distance: float
    median: float


@dataclass(frozen=True)
class ClassMap:
    """Images of unseen classes in two dimensions, with a name and an image for each class."""

    title: str
    points: NDArray[Any]
    labels: NDArray[Any]
    names: list[str]
    thumbnails: list[NDArray[Any]]
    ratio: float
    neighbours: float


def draw_pairs(path: Path, draws: Sequence[dict[str, ImagePair]]) -> None:
    """Save the nearest pairs on the left and the farthest on the right, a row for every draw."""
    highest = max(float(part.max()) for draw in draws for pair in draw.values() for part in pair.values)
    with picture(path, width=14, height=0.5 + 2.15 * len(draws)) as figure:
        halves = cast(Any, figure.subfigures(1, 2, wspace=0.05))
        for half, which in zip(halves, ("nearest", "farthest"), strict=True):
            half.suptitle(f"The {which} pair", x=0.02, ha="left", fontsize=13, fontweight="bold")
            grid = half.subplots(len(draws), 3, width_ratios=(1, 2.7, 1), squeeze=False)
            for row, draw in zip(grid, draws, strict=True):
                _pair(row, draw[which], highest)


def _pair(row: Any, pair: ImagePair, highest: float) -> None:
    roles = ("meta-training", "meta-test")
    parts = zip((row[0], row[2]), pair.images, pair.titles, roles, (BLUE, GREEN), strict=True)
    for axes, image, title, role, colour in parts:
        show_image(axes, _on_paper(image), 1)
        for side in axes.spines.values():
            side.set(visible=True, color=colour, linewidth=2)
        axes.set_title(role, color=colour, fontsize=10.5)
        name = textwrap.fill(textwrap.shorten(readable(title), 46, placeholder="…"), 18)
        axes.set_xlabel(name, fontsize=10, linespacing=1.1)
    axes = row[1]
    at = np.arange(len(pair.components))
    axes.bar(at - 0.21, pair.values[0], width=0.42, color=BLUE)
    axes.bar(at + 0.21, pair.values[1], width=0.42, color=GREEN)
    axes.set_ylim(min(0, *(float(part.min()) for part in pair.values)), 1.03 * highest)
    axes.set_xlim(-0.8, len(at) - 0.2)
    axes.set_xticks([])
    axes.set_xlabel(f"{len(at)} components of h", fontsize=10)
    axes.tick_params(axis="y", labelsize=9)
    axes.grid(axis="x", visible=False)
    axes.set_title(f"distance {pair.distance:.2f} (median of all pairs {pair.median:.2f})", fontsize=10.5)


def _on_paper(image: NDArray[Any]) -> NDArray[Any]:
    """Drawings as ink on paper, photographs as they are."""
    return 1 - image if image.shape[2] == 1 else image


def draw_maps(path: Path, maps: Sequence[ClassMap]) -> None:
    """Save the maps side by side; a class has the same colour and shape in all of them."""
    # Colours are assigned from left to right in the first map, so that neighbouring classes have different colours.
    rank = _centres(maps[0].points, maps[0].labels)[:, 0].argsort().argsort().tolist()
    styles = [(CLASS_COLOURS[i % len(CLASS_COLOURS)], SHAPES[i // len(CLASS_COLOURS) % len(SHAPES)]) for i in rank]
    with picture(path, width=6.6 * len(maps), height=7.3) as figure:
        for axes, shown in zip(figure.subplots(1, len(maps), squeeze=False)[0], maps, strict=True):
            _map(axes, shown, styles)


def _map(axes: Axes, shown: ClassMap, styles: Sequence[tuple[str, str]]) -> None:
    points = _in_unit_square(shown.points)
    centres = _centres(points, shown.labels)
    free = places(centres, points, THUMBNAIL * 1.12)
    for label, (centre, place) in enumerate(zip(centres, free, strict=True)):
        colour, shape = styles[label]
        mine = points[shown.labels == label]
        axes.scatter(mine[:, 0], mine[:, 1], s=17, color=colour, marker=shape, linewidths=0, alpha=0.85, zorder=2)
        axes.plot(*zip(centre, place, strict=True), color=colour, linewidth=1, zorder=3)
        half = THUMBNAIL / 2
        box = (place[0] - half, place[0] + half, place[1] - half, place[1] + half)
        show_image(axes, _on_paper(shown.thumbnails[label]), 1, extent=box, zorder=4)
        frame = [(box[0], box[2]), (box[1], box[2]), (box[1], box[3]), (box[0], box[3]), (box[0], box[2])]
        axes.plot(*zip(*frame, strict=True), color=colour, linewidth=2.2, zorder=5)
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), xticks=[], yticks=[], aspect="equal")
    axes.grid(visible=False)
    for side in axes.spines.values():
        side.set(visible=True, color=GREY, linewidth=0.8)
    near = f"nearest image of the same class {100 * shown.neighbours:.0f} %"
    axes.set_title(f"{shown.title}\nbetween / within {shown.ratio:.2f}, {near}", loc="left")


def _centres(points: NDArray[Any], labels: NDArray[Any]) -> NDArray[Any]:
    return np.stack([points[labels == label].mean(0) for label in range(int(labels.max()) + 1)])


def _in_unit_square(points: NDArray[Any]) -> NDArray[Any]:
    """The points moved and scaled, by the same factor in both directions, to the unit square."""
    low, high = points.min(0), points.max(0)
    return 0.98 * (points - (low + high) / 2) / float((high - low).max()) + 0.5


def places(centres: NDArray[Any], points: NDArray[Any], side: float) -> NDArray[Any]:
    """Places for squares of this side: near the centres, over few points, and not over each other.

    One after the other, each takes the best free place on rings around its centre.

    >>> centres = np.array([[0.5, 0.5], [0.5, 0.5]])
    >>> found = places(centres, np.full((9, 2), 0.5), 0.1)
    >>> bool((np.abs(found - 0.5).max(1) > 0.05).all()), bool(np.abs(found[0] - found[1]).max() >= 0.1)
    (True, True)
    """
    angles = np.linspace(0, 2 * np.pi, 24, endpoint=False) + np.pi / 2
    ring = np.stack([np.cos(angles), np.sin(angles)], 1)
    # The largest ring is as wide as the map, so that there is always a free place.
    rings = np.concatenate([np.zeros((1, 2)), *(radius * side * ring for radius in np.arange(0.7, 1.5 / side, 0.2))])
    taken = np.empty((0, 2))
    for centre in centres:
        free = centre + rings
        free = free[(free >= side / 2).all(1) & (free <= 1 - side / 2).all(1)]
        clear = (np.abs(free[:, None] - taken).max(2) >= side).all(1)
        free = free[clear] if clear.any() else free
        covered = (np.abs(free[:, None] - points).max(2) < side / 2 * 1.15).sum(1)
        cost = np.linalg.norm(free - centre, axis=1) + COVERED * covered
        taken = np.concatenate([taken, free[[int(cost.argmin())]]])
    return taken
