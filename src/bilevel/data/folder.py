"""Any folder that holds one folder of images per class."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from bilevel.data import tree
from bilevel.data.base import Source, Splits
from bilevel.data.cache import Prepared, Workspace
from bilevel.data.pictures import SUFFIXES, Mode, read_picture
from bilevel.data.splits import split_classes
from bilevel.errors import BilevelError


@dataclass(frozen=True)
class Folder(Source):
    """`path/CLASS/*.png` and so on: class names are folder names, sorted; hidden files and other kinds are left out.

    Args:
        path: the folder.
        size: side of the images; each is cut to its largest centred square and scaled. None keeps them as they are, and
            they must then all have one size.
        mode: "RGB" or "L" (grayscale). Images of another mode, 16-bit and transparent ones are converted, and what was
            converted is said once.
        invert: black on white becomes white on black, as in Omniglot and Glyphs.
        seed: of the split of the classes.
        fractions: shares of the classes for train, val and test.
    """

    path: Path = Path()
    size: int | None = None
    mode: Mode = "RGB"
    invert: bool = False
    seed: int = 0
    fractions: tuple[float, float, float] = (1.0, 0.0, 0.0)

    name: ClassVar[str] = "folder"
    after: ClassVar[tuple[str, ...]] = ("seed", "fractions", "path")

    def files(self, root: Path) -> list[Path]:
        if self.mode not in ("L", "RGB"):
            raise BilevelError(f"mode={self.mode!r} is unknown; pass 'RGB' or 'L' (grayscale).")
        if self.size is not None and self.size < 1:
            raise BilevelError(f"size={self.size} is no size of an image; pass a number of pixels, or None.")
        if not self.path.is_dir():
            raise BilevelError(f"There is no folder {self.path}; pass one that holds a folder of images per class.")
        return [self.path]

    def decode(self, root: Path, work: Workspace) -> Prepared:
        classes = class_files(self.path)
        files = [file for members in classes.values() for file in members]
        converted: Counter[str] = Counter()
        images = np.empty((0, 0, 0, 0), np.uint8)
        for number, file in enumerate(files):
            image, done = read_file(file, self.mode, self.size)
            if number == 0:
                images = work.empty((len(files), *image.shape))
            if image.shape != images.shape[1:]:
                raise BilevelError(
                    f"{file} is {image.shape[1]}×{image.shape[0]} and {files[0]} is {images.shape[2]}×"
                    f"{images.shape[1]}; pass size=… or --image-size … (84, say) to bring all to one size."
                )
            images[number] = 255 - image if self.invert else image
            converted[done] += 1
            if number % 50 == 49 or number + 1 == len(files):
                work.report(number + 1, len(files))
        notes = [
            f"{count} of {len(files)} images were {kind} and were converted to 8-bit {self.mode}."
            for kind, count in sorted(converted.items())
            if kind
        ]
        labels = np.repeat(np.arange(len(classes)), [len(members) for members in classes.values()])
        return Prepared(images, labels, {"classes": list(classes), "notes": notes})

    def splits(self, meta: Mapping[str, Any]) -> Splits:
        return split_classes(len(meta["classes"]), self.seed, self.fractions)


def class_files(path: Path) -> dict[str, list[Path]]:
    """The image files of every class folder in `path`, both sorted by name."""
    folders = sorted((entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(".")), key=str)
    if not folders:
        raise BilevelError(
            f"{path} holds no folders; put the images of each class into a folder of its own: "
            f"{path / 'CLASS' / 'a.png'}."
        )
    classes = {folder.name: image_files(folder) for folder in folders}
    empty = [name for name, files in classes.items() if not files]
    if empty:
        raise BilevelError(
            f"The class folder {path / empty[0]} holds no images ({', '.join(SUFFIXES)}). Add some, or remove the "
            "folder."
        )
    return classes


def image_files(folder: Path) -> list[Path]:
    """The image files directly in a folder, sorted by name."""
    return sorted(
        (file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")),
        key=str,
    )


def search(folder: Path) -> tuple[list[Path], list[Path]]:
    """The image files at any depth below a folder, and the files that are left out as hidden or of another kind.

    Hidden folders are not entered, and links to folders are not followed, so that a loop of links ends.
    """
    images: list[Path] = []
    others: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        here = Path(place)
        found = image_files(here)
        images += found
        others += [here / name for name in names if here / name not in found]
    return sorted(images, key=str), sorted(others, key=str)


def read_file(file: Path, mode: Mode, size: int | None = None) -> tuple[NDArray[np.uint8], str]:
    """One image file as H×W×C, and what it was converted from ("" when nothing was needed)."""
    return read_picture(tree.read_file(file), str(file), mode, size)
