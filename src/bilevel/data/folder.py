"""Any folder that holds one folder of images per class."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from bilevel.data.base import Source, Splits
from bilevel.data.cache import DecodedImages, Workspace
from bilevel.data.files import read_file
from bilevel.data.pictures import SUFFIXES, ColourMode, UnreadablePicture, open_picture
from bilevel.data.preparation import Kind, Preparation, prepared
from bilevel.data.splits import split_classes
from bilevel.errors import BilevelError

# Sub-folders that hold the classes of each split.
SPLITS = ("train", "val", "test")
# A note names this many files, and counts the rest.
NAMED = 5


@dataclass(frozen=True)
class Folder(Source):
    """`path/CLASS/*.png` and so on: class names are folder names, sorted; hidden files and other kinds are left out.

    Or `path/train/CLASS/*.png`, `path/val/…` and `path/test/…`, which decide how the classes are split.

    Args:
        path: the folder.
        size: side of the images; see `bilevel.data.preparation.Preparation`. None keeps photographs as they are, and
            they must then all have one size; drawings are brought to 28 pixels.
        mode: "RGB" or "L" (grayscale). Images of another mode, 16-bit and transparent ones are converted, and a
            note says so once.
        prepare: "photograph", "drawing" or "gray-drawing": how pictures are prepared.
        invert: black on white becomes white on black. None finds the polarity of drawings and leaves photographs.
        strict: whether an unreadable picture is an error; otherwise it is left out and listed in the notes.
        seed: the seed of the split of the classes.
        fractions: shares of the classes for train, val and test, where the folder has no `train/`, `val/` and `test/`.
    """

    path: Path = Path()
    size: int | None = None
    mode: ColourMode = "RGB"
    prepare: Kind = "photograph"
    invert: bool | None = None
    strict: bool = True
    seed: int = 0
    fractions: tuple[float, float, float] = (1.0, 0.0, 0.0)

    name: ClassVar[str] = "folder"
    version: ClassVar[int] = 2
    after: ClassVar[tuple[str, ...]] = ("seed", "fractions", "path")

    def files(self, root: Path) -> list[Path]:
        if self.mode not in ("L", "RGB"):
            raise BilevelError(f"mode={self.mode!r} is unknown; pass 'RGB' or 'L' (grayscale).")
        if self.size is not None and self.size < 1:
            raise BilevelError(f"size={self.size} is not an image size; pass a number of pixels, or None.")
        if not self.path.is_dir():
            raise BilevelError(f"There is no folder {self.path}; pass one that holds a folder of images per class.")
        return [self.path]

    def decode(self, root: Path, work: Workspace) -> DecodedImages:
        parts = split_folders(self.path)
        found = {part: class_files(self.path / part if part else self.path) for part in parts or [""]}
        twice = [name for name, count in Counter(name for part in found.values() for name in part).items() if count > 1]
        if twice:
            raise BilevelError(
                f"The class {twice[0]} is in more than one of {', '.join(f'{self.path / part}' for part in parts)}; "
                "each class belongs to one split, because test classes must be new to the model."
            )
        classes = {name: files for part in found.values() for name, files in part.items()}
        files = [(number, file) for number, members in enumerate(classes.values()) for file in members]
        images, labels, notes = self._read(files, work)
        missing = sorted(set(range(len(classes))) - set(labels.tolist()))
        if missing:
            raise BilevelError(f"No picture of the class {list(classes)[missing[0]]} can be read. {' '.join(notes)}")
        meta: dict[str, Any] = {"classes": list(classes), "notes": notes}
        if parts:
            names = list(classes)
            meta["splits"] = {part: [names.index(name) for name in found.get(part, {})] for part in SPLITS}
        return DecodedImages(images, labels, meta)

    def _read(self, files: list[tuple[int, Path]], work: Workspace) -> tuple[Any, NDArray[np.int64], list[str]]:
        """The images, their classes, and notes on what was converted or left out."""
        converted: Counter[str] = Counter()
        left_out: list[str] = []
        labels: list[int] = []
        images, how = np.empty((0, 0, 0, 0), np.uint8), None
        first = files[0][1]
        for number, (label, file) in enumerate(files):
            if number % 50 == 49 or number + 1 == len(files):
                work.report(number + 1, len(files))
            try:
                picture = open_picture(picture_contents(file), str(file))
                if how is None:
                    how, first = self._preparation(picture), file
                    images = work.empty((len(files), how.height, how.width, how.channels))
                if self.size is None and not how.draws:
                    _check_size(picture, file, first, how)
                made = prepared(picture, str(file), how)
            except UnreadablePicture as error:
                if self.strict:
                    raise
                left_out.append(str(error))
                continue
            images[len(labels)] = made.image
            labels.append(label)
            converted[made.converted] += 1
        notes = [
            f"{count} of {len(files)} images were {kind} and were converted to 8-bit {self.mode}."
            for kind, count in sorted(converted.items())
            if kind
        ]
        if left_out:
            more = f" And {len(left_out) - NAMED} more." if len(left_out) > NAMED else ""
            notes.append(f"{len(left_out)} unreadable pictures were left out. {' '.join(left_out[:NAMED])}{more}")
        images = np.array(images[: len(labels)]) if left_out else images
        return images, np.array(labels, np.int64), notes

    def _preparation(self, picture: Image.Image) -> Preparation:
        """How all pictures are prepared; the first one decides about the size where none was given."""
        width = height = self.size or 28
        if self.size is None and self.prepare == "photograph":
            width, height = ImageOps.exif_transpose(picture).size
        return self.preparation((height, width, 1 if self.mode == "L" else 3))

    def preparation(self, shape: Sequence[int]) -> Preparation:
        height, width, channels = shape
        return Preparation(self.prepare, channels, height, width, invert=self.invert)

    def splits(self, meta: Mapping[str, Any]) -> Splits:
        given: Splits | None = meta.get("splits")
        return given or split_classes(len(meta["classes"]), self.seed, self.fractions)


def split_folders(path: Path) -> list[str]:
    """Those of `train/`, `val/` and `test/` that a folder of splits has; none where it holds classes directly."""
    there = [entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    held = [name for name in SPLITS if name in there and any(inner.is_dir() for inner in (path / name).iterdir())]
    others = [name for name in there if name not in SPLITS]
    if held and others:
        raise BilevelError(
            f"{path} holds {', '.join(f'{name}/' for name in held)} with class folders and {others[0]}/ beside them. "
            "Put all classes into train/, val/ and test/, or all directly into the folder."
        )
    return held


def picture_contents(file: Path) -> bytes:
    """The contents of a picture's file. A file that cannot be read (a broken link, a FIFO) is an unreadable picture."""
    try:
        return read_file(file)
    except BilevelError as error:
        raise UnreadablePicture(str(error)) from error


def _check_size(picture: Image.Image, file: Path, first: Path, how: Preparation) -> None:
    width, height = ImageOps.exif_transpose(picture).size
    if (width, height) != (how.width, how.height):
        raise BilevelError(
            f"{file} is {width}×{height} and {first} is {how.width}×{how.height}; pass size=… or --image-size … (84, "
            "say) to bring all to one size."
        )


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
        others += [here / name for name in set(names) - {file.name for file in found}]
    return sorted(images, key=str), sorted(others, key=str)
