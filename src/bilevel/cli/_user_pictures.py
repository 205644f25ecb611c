"""The pictures of `bilevel classify`: found, read whatever their kind, and brought to what the model takes."""

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

# Errors and notes name so many files, and count the rest.
NAMED = 5
# Pixels per side of the originals in the picture of the answers.
SHOWN = 112


@dataclass(frozen=True)
class PictureFiles:
    """The files: of every class, of the queries, the classes of those whose folder names it, and what was left out."""

    classes: dict[str, list[Path]]
    queries: list[Path]
    names: list[str]
    truth: list[str | None]
    left_out: list[Path]

    def without(self, wrong: Collection[Path]) -> PictureFiles:
        """The same without some files."""
        classes = {name: [file for file in files if file not in wrong] for name, files in self.classes.items()}
        kept = [number for number, file in enumerate(self.queries) if file not in wrong]
        queries, names = [self.queries[k] for k in kept], [self.names[k] for k in kept]
        return PictureFiles(classes, queries, names, [self.truth[k] for k in kept], self.left_out)

    def labels(self) -> list[str]:
        """The class of every labelled picture, in their order."""
        return [name for name, files in self.classes.items() for _ in files]

    def everything(self) -> list[Path]:
        return [*(file for files in self.classes.values() for file in files), *self.queries]


@dataclass(frozen=True)
class Pictures:
    """Pictures as the model takes them, uint8 N×H×W×C, what to call them, and small versions of what they were."""

    names: list[str]
    images: NDArray[np.uint8]
    shown: list[NDArray[np.uint8]]


def find(support: Path | None, query: Path | None, known: Collection[str] = ()) -> PictureFiles:
    """The pictures of a support folder, if there is one, and of a query folder or file.

    Args:
        support: a folder of class folders; None for a classifier that knows its classes.
        query: a folder or a picture; None where only labelled pictures are read.
        known: the names of the classes where there is no support folder.
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
    # A file directly in the folder has no class, even where it is called like one.
    truth = [path.parts[0] if len(path.parts) > 1 and path.parts[0] in classes else None for path in relative]
    return PictureFiles(classes, queries, [printable(path.as_posix()) for path in relative], truth, left_out + others)


def _labelled(support: Path) -> tuple[dict[str, list[Path]], list[Path]]:
    """The pictures of every class, and the files that were left out."""
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
    return classes, [file for file in pictures if file not in used] + others


def read(
    found: PictureFiles, preparation: Preparation, strict: bool
) -> tuple[PictureFiles, Pictures, Pictures, list[str]]:
    """The files that can be read, support and query pictures as the model takes them, and what was done to them.

    Args:
        found: the files.
        preparation: how pictures become what the model takes.
        strict: whether an unreadable picture is an error; otherwise it is left out, and the notes say so.
    """
    seen: dict[Path, _Seen] = {}
    wrong: dict[Path, str] = {}
    for file in found.everything():
        try:
            seen[file] = _open(file, preparation)
        except BilevelError as error:
            wrong[file] = str(error)
    more = f"\nand {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
    listed = "\n".join(list(wrong.values())[:NAMED]) + more
    if wrong and strict:
        raise BilevelError(f"{listed}\nLeave --strict out to go on without what cannot be read.")
    asked, found = found, found.without(wrong)
    empty = next((name for name, files in found.classes.items() if not files and asked.classes[name]), None)
    if wrong and (empty is not None or (asked.queries and not found.queries)):
        what = f"picture of the class {empty}" if empty is not None else "new picture"
        raise BilevelError(f"No {what} can be read:\n{listed}")
    files = found.everything()
    all_seen = [seen[file] for file in files]
    notes = [f"Unreadable, so left out ({len(wrong)}; --strict: stop instead): {_named(list(wrong))}."] if wrong else []
    notes += _notes(found, all_seen, preparation)
    count = len(files) - len(found.queries)
    blank = [file for file in files if seen[file].made.blank]
    if blank:
        notes.append(f"Blank, so what is said about them means nothing: {_named(blank)}.")
    known = {one.digest for one in all_seen[:count]}
    again = [file for file in found.queries if seen[file].digest in known]
    if again:
        notes.append(f"Among the labelled pictures already, so no test of the classifier: {_named(again)}.")
    names = [printable(str(file)) for file in files[:count]]
    shown = [one.shown for one in all_seen]
    images = np.stack([one.made.image for one in all_seen])
    labelled = Pictures(names, images[:count], shown[:count])
    return found, labelled, Pictures(found.names, images[count:], shown[count:]), notes


def looks_drawn(file: Path) -> bool | None:
    """Whether a picture looks like a drawing; None if it cannot be read."""
    try:
        return is_drawing(open_picture(read_file(file), str(file)))
    except (BilevelError, OSError, ValueError):
        return None


@dataclass(frozen=True)
class _Seen:
    """What is kept of a file: small pictures and some facts, because photographs do not all fit into memory."""

    made: PreparedPicture
    shown: NDArray[np.uint8]
    size: tuple[int, int]
    kind: str
    digest: bytes


def _open(file: Path, preparation: Preparation) -> _Seen:
    contents, name = read_file(file), printable(str(file))
    picture = open_picture(contents, name)
    made = prepared(picture, name, preparation)
    kind = made.converted or ("colour" if preparation.draws and picture.mode not in ("1", "L") else "")
    upright = ImageOps.exif_transpose(picture).convert("L" if preparation.draws else "RGB")
    upright.thumbnail((SHOWN, SHOWN))
    return _Seen(made, to_array(upright), picture.size, kind, hashlib.sha256(contents).digest())


def _notes(found: PictureFiles, seen: Sequence[_Seen], preparation: Preparation) -> list[str]:
    notes = []
    if found.left_out:
        notes.append(
            f"Left out ({len(found.left_out)}: hidden, no pictures, or not directly in a class folder): "
            f"{_named(found.left_out)}."
        )
    to = "8-bit gray" if preparation.draws or preparation.channels == 1 else "8-bit colour"
    notes += [
        f"{number} of {len(seen)} pictures were {kind} and were converted to {to}."
        for kind, number in sorted(Counter(one.kind for one in seen).items())
        if kind
    ]
    height, width = preparation.height, preparation.width
    scaled = sum(one.size != (width, height) for one in seen)
    if scaled:
        others = sum(one.size[0] * height != one.size[1] * width for one in seen)
        how = "filled up at the sides with paper" if preparation.draws else "cut to their middle"
        sides = f", {others} of them {how}" if others else ""
        notes.append(f"{scaled} of {len(seen)} pictures were scaled to {width}×{height}{sides}.")
    counts = {name: sum(getattr(one.made, name) for one in seen) for name in ("inverted", "evened", "moved", "redrawn")}
    if preparation.draws or counts["inverted"]:
        found_out = preparation.invert is None and counts["inverted"]
        why = " because their ink is darker than the paper (--no-invert: do not)" if found_out else ""
        notes.append(f"{counts['inverted']} of {len(seen)} pictures were inverted{why}.")
    if preparation.draws:
        notes.append("The model knows light ink on black, so the paper was made black and the ink white.")
    done = {
        "evened": "had uneven paper, which was evened out",
        "moved": "had their ink far from the middle, small or large, and were cropped to it",
        "redrawn": "had thin or thick strokes, which were drawn anew with the width that the model knows",
    }
    cleaned = [f"{counts[name]} of {len(seen)} pictures {text}" for name, text in done.items() if counts[name]]
    if cleaned:
        notes.append("; ".join(cleaned) + " (--no-clean: do not).")
    return notes


def _named(files: Sequence[Path]) -> str:
    shown = ", ".join(printable(str(file)) for file in files[:NAMED])
    return shown + (f" and {len(files) - NAMED} more" if len(files) > NAMED else "")
