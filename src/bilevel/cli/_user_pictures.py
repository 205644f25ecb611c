"""The pictures of `bilevel classify`: finding the files, reading them, and converting them to inputs of the model."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import ImageOps

from bilevel.cli._output import printable
from bilevel.data.drawings import is_drawing
from bilevel.data.files import read_file
from bilevel.data.folder import class_files, search
from bilevel.data.pictures import SUFFIXES, open_picture, to_array
from bilevel.data.preparation import Preparation, PreparedPicture, prepared
from bilevel.errors import BilevelError

# How many files errors and notes name. They count the others.
NAMED = 5
# The largest width and height, in pixels, of the originals that --picture shows.
SHOWN = 112


@dataclass(frozen=True)
class PictureFiles:
    """The files of every class and of the queries, with names and known classes of the queries; and files left out."""

    classes: dict[str, list[Path]]
    queries: list[Path]
    names: list[str]
    truth: list[str | None]
    left_out: list[Path]

    def without(self, removed: Collection[Path]) -> PictureFiles:
        """The same without some of the files."""
        classes = {name: [file for file in files if file not in removed] for name, files in self.classes.items()}
        kept = [number for number, file in enumerate(self.queries) if file not in removed]
        queries, names = [self.queries[k] for k in kept], [self.names[k] for k in kept]
        return PictureFiles(classes, queries, names, [self.truth[k] for k in kept], self.left_out)

    def labels(self) -> list[str]:
        """The class of every labelled picture, in the order of the pictures."""
        return [name for name, files in self.classes.items() for _ in files]

    def everything(self) -> list[Path]:
        return [*(file for files in self.classes.values() for file in files), *self.queries]


@dataclass(frozen=True)
class Pictures:
    """Pictures as inputs of the model, uint8 N×H×W×C, their names, and small versions of the originals."""

    names: list[str]
    images: NDArray[np.uint8]
    shown: list[NDArray[np.uint8]]


def find(support: Path | None, query: Path | None, known: Collection[str] = ()) -> PictureFiles:
    """The pictures of a support folder, if there is one, and of a query folder or file.

    Args:
        support: a folder with one folder of pictures per class; None for a saved classifier.
        query: a folder or a picture; None if only labelled pictures are read.
        known: the names of the classes of a saved classifier.
    """
    classes: dict[str, list[Path]] = {name: [] for name in known}
    left_out: list[Path] = []
    if support is not None:
        classes, left_out = _labelled(support)
    if query is None:
        return PictureFiles(classes, [], [], [], left_out)
    if query.is_file():
        return PictureFiles(classes, [query], [printable(query.name)], [None], left_out)
    if not query.is_dir():
        raise BilevelError(f"--query {query} is neither a folder nor a picture.")
    queries, others = search(query)
    if not queries:
        raise BilevelError(f"There are no pictures ({', '.join(SUFFIXES)}) in --query {query} or its folders.")
    relative = [file.relative_to(query) for file in queries]
    # A file directly in the folder has no class, even if it has the name of one.
    truth = [path.parts[0] if len(path.parts) > 1 and path.parts[0] in classes else None for path in relative]
    return PictureFiles(classes, queries, [printable(path.as_posix()) for path in relative], truth, left_out + others)


def _labelled(support: Path) -> tuple[dict[str, list[Path]], list[Path]]:
    """The pictures of every class, and the files that were left out."""
    if not support.is_dir():
        raise BilevelError(
            f"--support {support} is not a folder; pass one that has a folder of pictures for each class: "
            f"{support / 'CLASS' / 'a.png'}."
        )
    classes = class_files(support)
    if len(classes) < 2:
        raise BilevelError(
            f"{support} has one class only, {next(iter(classes))}; a classifier needs at least two. Add a folder of "
            "pictures of another class."
        )
    used = {file for files in classes.values() for file in files}
    pictures, others = search(support)
    return classes, [file for file in pictures if file not in used] + others


def read(
    files: PictureFiles, preparation: Preparation, strict: bool
) -> tuple[PictureFiles, Pictures, Pictures, list[str]]:
    """The files that can be read, the support and query pictures as inputs of the model, and notes on the conversion.

    Args:
        files: the files.
        preparation: how pictures become inputs of the model.
        strict: whether an unreadable picture is an error. If not, it is left out, and a note says so.
    """
    by_file, errors = _read_all(files.everything(), preparation)
    more = f"\nand {len(errors) - NAMED} more" if len(errors) > NAMED else ""
    listed = "\n".join(list(errors.values())[:NAMED]) + more
    if errors and strict:
        raise BilevelError(f"{listed}\nLeave --strict out to continue without these pictures.")
    readable = files.without(errors)
    empty = next((name for name, kept in readable.classes.items() if not kept and files.classes[name]), None)
    if errors and (empty is not None or (files.queries and not readable.queries)):
        what = f"picture of the class {empty}" if empty is not None else "new picture"
        raise BilevelError(f"No {what} can be read:\n{listed}")
    everything = readable.everything()
    pictures = [by_file[file] for file in everything]
    notes = []
    if errors:
        named, reason = _named(list(errors)), next(iter(errors.values()))
        notes.append(f"Unreadable, so left out ({len(errors)}; --strict: stop instead): {named}. The first: {reason}")
    notes += _notes(readable, pictures, preparation)
    count = len(everything) - len(readable.queries)
    blank = [file for file in everything if by_file[file].prepared.blank]
    if blank:
        notes.append(f"Blank, so their predictions are meaningless: {_named(blank)}.")
    labelled_digests = {picture.digest for picture in pictures[:count]}
    repeated = [file for file in readable.queries if by_file[file].digest in labelled_digests]
    if repeated:
        notes.append(f"Also among the labelled pictures, so they do not test the classifier: {_named(repeated)}.")
    names = [printable(str(file)) for file in everything[:count]]
    shown = [picture.shown for picture in pictures]
    images = np.stack([picture.prepared.image for picture in pictures])
    labelled = Pictures(names, images[:count], shown[:count])
    return readable, labelled, Pictures(readable.names, images[count:], shown[count:]), notes


def _read_all(files: Sequence[Path], preparation: Preparation) -> tuple[dict[Path, _ReadPicture], dict[Path, str]]:
    """The pictures that can be read, and the errors of the others."""
    pictures: dict[Path, _ReadPicture] = {}
    errors: dict[Path, str] = {}
    for file in files:
        try:
            pictures[file] = _open(file, preparation)
        except BilevelError as error:
            errors[file] = str(error)
    return pictures, errors


def looks_drawn(file: Path) -> bool | None:
    """Whether a picture looks like a drawing; None if it cannot be read."""
    try:
        return is_drawing(open_picture(read_file(file), str(file)))
    except (BilevelError, OSError, ValueError):
        return None


@dataclass(frozen=True)
class _ReadPicture:
    """A picture in small versions and some facts about it, because many photographs do not fit into memory."""

    prepared: PreparedPicture
    shown: NDArray[np.uint8]
    size: tuple[int, int]
    kind: str
    digest: bytes


def _open(file: Path, preparation: Preparation) -> _ReadPicture:
    contents, name = read_file(file), printable(str(file))
    picture = open_picture(contents, name)
    made = prepared(picture, name, preparation)
    kind = made.converted or ("colour" if preparation.draws and picture.mode not in ("1", "L") else "")
    upright = ImageOps.exif_transpose(picture).convert("L" if preparation.draws else "RGB")
    upright.thumbnail((SHOWN, SHOWN))
    return _ReadPicture(made, to_array(upright), picture.size, kind, hashlib.sha256(contents).digest())


def _notes(files: PictureFiles, pictures: Sequence[_ReadPicture], preparation: Preparation) -> list[str]:
    """Sentences about files that were left out, and about the conversion of the others."""
    notes = []
    if files.left_out:
        notes.append(
            f"Left out ({len(files.left_out)}: hidden, no pictures, or not directly in a class folder): "
            f"{_named(files.left_out)}."
        )
    to = "8-bit gray" if preparation.draws or preparation.channels == 1 else "8-bit colour"
    notes += [
        f"{number} of {len(pictures)} pictures were {kind} and were converted to {to}."
        for kind, number in sorted(Counter(picture.kind for picture in pictures).items())
        if kind
    ]
    height, width = preparation.height, preparation.width
    scaled = sum(picture.size != (width, height) for picture in pictures)
    if scaled:
        others = sum(picture.size[0] * height != picture.size[1] * width for picture in pictures)
        how = "filled up at the sides with paper" if preparation.draws else "cut to their middle"
        sides = f", {others} of them {how}" if others else ""
        notes.append(f"{scaled} of {len(pictures)} pictures were scaled to {width}×{height}{sides}.")
    changes = ("inverted", "evened", "moved", "redrawn")
    counts = {name: sum(getattr(picture.prepared, name) for picture in pictures) for name in changes}
    if preparation.draws or counts["inverted"]:
        automatic = preparation.invert is None and counts["inverted"]
        why = " because their ink is darker than the paper (--no-invert: do not)" if automatic else ""
        notes.append(f"{counts['inverted']} of {len(pictures)} pictures were inverted{why}.")
    if preparation.draws:
        notes.append("The model was trained on light ink on black, so the paper was made black and the ink white.")
    done = {
        "evened": "had uneven paper, which was evened out",
        "moved": "had their ink far from the middle, small or large, and were cropped to it",
        "redrawn": "had thin or thick strokes, which were redrawn with the width of the training pictures",
    }
    cleaned = [f"{counts[name]} of {len(pictures)} pictures {text}" for name, text in done.items() if counts[name]]
    if cleaned:
        notes.append("; ".join(cleaned) + " (--no-clean: do not).")
    return notes


def _named(files: Sequence[Path]) -> str:
    shown = ", ".join(printable(str(file)) for file in files[:NAMED])
    return shown + (f" and {len(files) - NAMED} more" if len(files) > NAMED else "")
