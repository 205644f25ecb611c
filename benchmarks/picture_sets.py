"""Letters, digits and photographs like those of users, on which no model was trained, in several conditions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image

from bilevel.data import ImageDataset, load
from bilevel.data.base import source
from bilevel.data.files import open_tree
from bilevel.data.omniglot import DRAWING, LIMITS, drawing
from bilevel.data.places import data_root

# The number of pictures of each class that are used. Omniglot has 20 of each letter.
LETTERS_EACH, DIGITS_EACH, PHOTOGRAPHS_EACH = 5, 60, 40
# The size in pixels of a page with a drawing in a corner, and of that drawing.
PAGE, ON_PAGE = (420, 300), (70, 110)
Change = Callable[[Image.Image, np.random.Generator], Image.Image]


@dataclass(frozen=True)
class PictureSet:
    """Labelled pictures, and the size of the episodes that are sampled from them.

    Args:
        name: the name of the set in the table.
        ways: the number of classes of an episode.
        shots: the number of labelled pictures of each class.
        queries: the number of pictures of each class that are to be classified.
        pictures: returns (class, picture) pairs in a fixed order.
        drawn: whether the pictures are drawings.
    """

    name: str
    ways: int
    shots: int
    queries: int
    pictures: Callable[[], Iterator[tuple[int, Image.Image]]]
    drawn: bool = True


def as_it_is(picture: Image.Image, draw: np.random.Generator) -> Image.Image:
    return picture


def mixed(picture: Image.Image, draw: np.random.Generator) -> Image.Image:
    """The picture resized to 20 to 200 pixels, light on dark or dark on light."""
    side = int(draw.integers(20, 201))
    made = picture.resize((side, side), Image.Resampling.BICUBIC)
    return Image.fromarray(255 - np.asarray(made)) if draw.random() < 0.5 else made


def in_a_corner(picture: Image.Image, draw: np.random.Generator) -> Image.Image:
    """The picture, made small, in one of the four corners of a light page."""
    side = int(draw.integers(*ON_PAGE))
    page = Image.new("L", PAGE, int(draw.integers(225, 250)))
    small = picture.resize((side, side), Image.Resampling.BICUBIC).point(lambda value: 20 + value * 205 // 255)
    left, top = (int(draw.integers(0, 2)) * (room - side) for room in PAGE)
    where = (left, top, left + side, top + side)
    page.paste(Image.fromarray(np.minimum(np.asarray(small), np.asarray(page.crop(where)))), where)
    return page


def in_a_shadow(picture: Image.Image, draw: np.random.Generator) -> Image.Image:
    """The picture with brightness that falls to a third from one side to the other, and with noise."""
    side = 160
    ink = np.asarray(picture.resize((side, side), Image.Resampling.BICUBIC), dtype=float)
    angle = draw.uniform(0, 2 * np.pi)
    row, column = np.indices((side, side)) / side - 0.5
    light = 1 / (1 + np.exp(-6 * (row * np.sin(angle) + column * np.cos(angle))))
    lit = (40 + ink * 200 / 255) * (0.33 + 0.67 * light) + draw.normal(0, 3, (side, side))
    return Image.fromarray(lit.clip(0, 255).astype(np.uint8))


@cache
def letters(full: bool) -> list[tuple[int, Image.Image]]:
    """Every third of Omniglot's meta-test characters, dark on light: the original files, or drawings of 28 pixels."""
    data = load("omniglot")
    chosen = {data.classes[label]: label for label in data.splits["test"][::3]}
    if not full:
        rows = {label: np.flatnonzero(data.labels == label)[:LETTERS_EACH] for label in chosen.values()}
        return [(label, _dark(data.images[row, :, :, 0])) for label in rows for row in rows[label]]
    found: dict[int, list[Image.Image]] = {label: [] for label in chosen.values()}
    for path in source("omniglot", {}).files(data_root()):
        with open_tree(path, LIMITS) as tree:
            for name in tree.names:
                match = re.match(DRAWING, name)
                label = chosen.get(f"{match[1]}/{match[2]}") if match else None
                if label is not None and len(found[label]) < LETTERS_EACH:
                    found[label].append(_dark(drawing(tree.read(name), name)))
    return [(label, picture) for label, pictures in found.items() for picture in pictures]


@cache
def digits() -> list[tuple[int, Image.Image]]:
    """The first pictures of each class of MNIST's official test part, dark on light."""
    data = load("mnist")
    rows = _some(data, data.parts["test"], DIGITS_EACH)
    return [(int(data.labels[row]), _dark(data.images[row, :, :, 0])) for row in rows]


@cache
def photographs() -> list[tuple[int, Image.Image]]:
    """The first pictures of each of MiniImagenet's meta-test classes."""
    data = load("miniimagenet")
    rows = _some(data, np.flatnonzero(np.isin(data.labels, data.splits["test"])), PHOTOGRAPHS_EACH)
    return [(int(data.labels[row]), Image.fromarray(data.images[row])) for row in rows]


def _dark(ink: np.ndarray) -> Image.Image:
    return Image.fromarray(255 - np.ascontiguousarray(ink))


def _some(data: ImageDataset, rows: np.ndarray, each: int) -> np.ndarray:
    labels = data.labels[rows]
    return np.concatenate([rows[labels == label][:each] for label in np.unique(labels)])


def changed(pictures: Callable[[], list[tuple[int, Image.Image]]], change: Change) -> Callable[[], Iterator]:
    """A function that yields the changed pictures. Each has its own random numbers, the same in every run."""

    def made() -> Iterator[tuple[int, Image.Image]]:
        for number, (label, picture) in enumerate(pictures()):
            yield label, change(picture, np.random.default_rng([7, number]))

    return made


def sets() -> list[PictureSet]:
    small, full = (lambda: letters(False)), (lambda: letters(True))
    return [
        PictureSet("letters, 28 pixels", 20, 1, 3, changed(small, as_it_is)),
        PictureSet("letters, original files", 20, 1, 3, changed(full, as_it_is)),
        PictureSet("letters in a corner", 20, 1, 3, changed(full, in_a_corner)),
        PictureSet("letters in a shadow", 20, 1, 3, changed(full, in_a_shadow)),
        PictureSet("digits, 28 pixels", 10, 5, 5, changed(digits, as_it_is)),
        PictureSet("digits, mixed sizes and polarities", 10, 5, 5, changed(digits, mixed)),
        PictureSet("digits in a corner", 10, 5, 5, changed(digits, in_a_corner)),
        PictureSet("digits in a shadow", 10, 5, 5, changed(digits, in_a_shadow)),
        PictureSet("photographs, 1 of each class", 5, 1, 5, changed(photographs, as_it_is), drawn=False),
        PictureSet("photographs, 5 of each class", 5, 5, 5, changed(photographs, as_it_is), drawn=False),
    ]
