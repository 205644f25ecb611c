"""The pictures of `bilevel classify`: found, read whatever their kind, and brought to what the model takes."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from bilevel.data import tree
from bilevel.data.folder import class_files, search
from bilevel.data.pictures import SUFFIXES, Mode, border, convert, open_picture, to_shape
from bilevel.errors import BilevelError

# Errors and notes name so many files, and count the rest.
NAMED = 5
# Less contrast than this, of 255, is the noise of blank paper.
FAINT = 16


@dataclass(frozen=True)
class Found:
    """The files: of every class, of the queries, the classes of those whose folder names it, and what was left out."""

    classes: dict[str, list[Path]]
    queries: list[Path]
    names: list[str]
    truth: list[str | None]
    left_out: list[Path]

    def everything(self) -> list[Path]:
        return [*(file for files in self.classes.values() for file in files), *self.queries]


@dataclass(frozen=True)
class Pictures:
    """Pictures as the model takes them, uint8 N×H×W×C, and what to call them."""

    names: list[str]
    images: NDArray[np.uint8]


@dataclass(frozen=True)
class Read:
    """Support and query pictures, and what was done to them."""

    support: Pictures
    query: Pictures
    notes: list[str]


def find(support: Path, query: Path) -> Found:
    """The pictures of a support folder and of a query folder or file."""
    if not support.is_dir():
        raise BilevelError(
            f"--support {support} is no folder; pass one that holds a folder of pictures for each class: "
            f"{support / 'CLASS' / 'a.png'}."
        )
    classes = class_files(support)
    if len(classes) < 2:
        raise BilevelError(
            f"{support} has one class only, {next(iter(classes))}; a classifier needs at least two. Add a folder of "
            "pictures of what it should be told apart from."
        )
    used = {file for files in classes.values() for file in files}
    pictures, others = search(support)
    left_out = [file for file in pictures if file not in used] + others
    if query.is_file():
        return Found(classes, [query], [printable(query.name)], [None], left_out)
    if not query.is_dir():
        raise BilevelError(f"--query {query} is neither a folder nor a picture.")
    queries, others = search(query)
    if not queries:
        raise BilevelError(f"There are no pictures ({', '.join(SUFFIXES)}) in --query {query} or its folders.")
    relative = [file.relative_to(query) for file in queries]
    # A file directly in the folder has no class, even where it is called like one.
    truth = [path.parts[0] if len(path.parts) > 1 and path.parts[0] in classes else None for path in relative]
    return Found(classes, queries, [printable(path.as_posix()) for path in relative], truth, left_out + others)


def read(found: Found, shape: tuple[int, ...], ink: bool, invert: bool | None) -> Read:
    """All pictures at the model's (C, H, W).

    Args:
        found: the files.
        shape: of what the model takes.
        ink: whether the model knows light ink on black; the pictures are then brought to that.
        invert: whether to swap light and dark; None decides by the borders where there is ink, and else does not.
    """
    channels, height, width = shape
    if channels not in (1, 3):
        raise BilevelError(f"The model takes pictures with {channels} channels; gray (1) and colour (3) can be read.")
    mode: Mode = "L" if channels == 1 else "RGB"
    files = found.everything()
    # A drawing is all of its ink. A photograph is cut to its middle, as in training on a folder of them.
    seen = _open(files, mode, height, width, whole=ink)
    negatives = _negatives(seen) if invert is None and ink else [bool(invert)] * len(seen)
    images = np.stack([255 - one.image if swap else one.image for one, swap in zip(seen, negatives, strict=True)])
    notes = _notes(found, seen, mode, height, width, whole=ink)
    if any(negatives) or ink:
        why = " because of their light borders (--no-invert: do not)" if invert is None and any(negatives) else ""
        notes.append(f"{sum(negatives)} of {len(seen)} pictures were inverted{why}.")
    if ink:
        images = np.stack([as_ink(image) for image in images])
        notes.append("The model knows light ink on black, so the paper was made black and the ink white.")
    blank = [file for file, image in zip(files, images, strict=True) if image.min() == image.max()]
    if blank:
        notes.append(f"Blank, so what is said about them means nothing: {_named(blank)}.")
    count = len(files) - len(found.queries)
    known = {one.digest for one in seen[:count]}
    again = [file for file, one in zip(found.queries, seen[count:], strict=True) if one.digest in known]
    if again:
        notes.append(f"Among the labelled pictures already, so no test of the classifier: {_named(again)}.")
    names = [printable(str(file)) for file in files[:count]]
    return Read(Pictures(names, images[:count]), Pictures(found.names, images[count:]), notes)


def as_ink(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Light ink on black at full contrast: the border becomes 0, and the strongest hundredth of the ink 255.

    Paper is rarely white and ink rarely black, and models of drawings know nothing else. Clean drawings stay as they
    are.
    """
    values = image.astype(np.float64)
    paper = np.median(border(Image.fromarray(image[:, :, 0])))
    strongest = np.percentile(values, 99)
    if strongest - paper < FAINT:
        return np.zeros_like(image)
    return np.clip((values - paper) / (strongest - paper) * 255, 0, 255).astype(np.uint8)


@dataclass(frozen=True)
class _Seen:
    """What is kept of a file: the small picture and some facts, because photographs do not all fit into memory."""

    image: NDArray[np.uint8]
    size: tuple[int, int]
    kind: str
    light: float
    digest: bytes


def _open(files: Sequence[Path], mode: Mode, height: int, width: int, whole: bool) -> list[_Seen]:
    """The pictures at the model's size; all unreadable ones are named at once."""
    seen, wrong = [], []
    for file in files:
        try:
            seen.append(_open_one(file, mode, height, width, whole))
        except BilevelError as error:
            wrong.append(str(error))
        except (OSError, ValueError) as error:
            wrong.append(f"The image {printable(str(file))} cannot be converted: {error}.")
    if wrong:
        more = f"\nand {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
        raise BilevelError("\n".join(wrong[:NAMED]) + more)
    return seen


def _open_one(file: Path, mode: Mode, height: int, width: int, whole: bool) -> _Seen:
    contents = tree.read_file(file)
    picture = open_picture(contents, printable(str(file)))
    made, kind = convert(picture, mode)
    kind = kind or ("colour" if mode == "L" and picture.mode not in ("1", "L") else "")
    light = float(np.mean(border(made) > 127))
    return _Seen(to_shape(made, height, width, whole), made.size, kind, light, hashlib.sha256(contents).digest())


def _negatives(seen: Sequence[_Seen]) -> list[bool]:
    """Which pictures are dark on light: those with a light border.

    Where ink runs along a border it is of both kinds. Such a picture is taken as most of the others are, and only one
    whose border is clearly of the other kind is not.
    """
    bound = 0.1 if np.median([one.light for one in seen]) > 0.5 else 0.9
    return [one.light > bound for one in seen]


def _notes(found: Found, seen: Sequence[_Seen], mode: Mode, height: int, width: int, whole: bool) -> list[str]:
    notes = []
    if found.left_out:
        notes.append(
            f"Left out ({len(found.left_out)}: hidden, no pictures, or not directly in a class folder): "
            f"{_named(found.left_out)}."
        )
    to = {"L": "8-bit gray", "RGB": "8-bit colour"}[mode]
    notes += [
        f"{number} of {len(seen)} pictures were {kind} and were converted to {to}."
        for kind, number in sorted(Counter(one.kind for one in seen).items())
        if kind
    ]
    scaled = sum(one.size != (width, height) for one in seen)
    if scaled:
        others = sum(one.size[0] * height != one.size[1] * width for one in seen)
        how = "filled up at the sides with their border's colour" if whole else "cut to their middle"
        sides = f", {others} of them {how}" if others else ""
        notes.append(f"{scaled} of {len(seen)} pictures were scaled to {width}×{height}{sides}.")
    return notes


def printable(name: str) -> str:
    """The name of a file with what no terminal or JSON can show written out."""
    shown = name.encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in shown)


def _named(files: Sequence[Path]) -> str:
    shown = ", ".join(printable(str(file)) for file in files[:NAMED])
    return shown + (f" and {len(files) - NAMED} more" if len(files) > NAMED else "")
