"""Omniglot: 1,623 handwritten characters of 50 alphabets, each drawn by 20 people (Lake et al., 2015)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from bilevel.data import download
from bilevel.data.base import Source, Splits
from bilevel.data.cache import DecodedImages, Workspace
from bilevel.data.drawings import nearest
from bilevel.data.files import ArchiveLimits, locate, missing, open_tree
from bilevel.data.pictures import open_picture
from bilevel.data.preparation import Kind
from bilevel.data.splits import shuffled
from bilevel.errors import BilevelError

ADDRESS = "https://raw.githubusercontent.com/brendenlake/omniglot/master/python/"
SETS = ("images_background", "images_evaluation")
# Of the names and pixels of the drawings in sorted order, so that it does not matter how they are packed.
SHA256 = {
    "images_background": "a124c5a5a976a2325d0833f6ed0f099009f18539b78de62d281d2188a44c0646",
    "images_evaluation": "aea28c3ae3e13f70f5ca1e76e5dc886e9f9958b67730065a5efab5629664ea76",
}
CHARACTERS = {"images_background": 964, "images_evaluation": 659}
DRAWING = re.compile(r"^([^/]+)/(character\d+)/(\d+_\d+)\.png$")
SIDE, FULL = 28, 105
LIMITS = ArchiveLimits(members=100_000, member=2**20, total=2**28)


@dataclass(frozen=True)
class Omniglot(Source):
    """Drawings 28×28 with ink = 255, characters split 1200/100/323 by a seeded shuffle of their sorted names.

    Rotations by 90° as new classes are a matter of the episodes (`Episodes(…, rotations=True)`): nothing is copied.

    Args:
        seed: the seed of the split.
    """

    seed: int = 0

    name: ClassVar[str] = "omniglot"
    pictures: ClassVar[Kind] = "drawing"

    def files(self, root: Path) -> list[Path]:
        found = {name: locate(root, self.name, name) for name in SETS}
        lost = [name for name, path in found.items() if path is None]
        if lost:
            raise missing(
                "Omniglot",
                root,
                [f"{name}.zip (nor folder {name}/)" for name in lost],
                self.name,
                f"Run `bilevel data download omniglot`, or get {' and '.join(ADDRESS + n + '.zip' for n in lost)}.",
            )
        return [path for path in found.values() if path is not None]

    def decode(self, root: Path, work: Workspace) -> DecodedImages:
        drawings: dict[str, list[NDArray[np.uint8]]] = {}
        done = 0
        for path in self.files(root):
            expected = CHARACTERS[path.stem]
            before = len(drawings)
            with open_tree(path, LIMITS) as tree:
                for name in tree.names:
                    if (match := DRAWING.match(name)) is None:
                        continue
                    ink = drawing(tree.read(name), tree.describe(name))
                    drawings.setdefault(f"{match[1]}/{match[2]}", []).append(nearest(ink, SIDE))
                    done += 1
                    if done % 100 == 0:
                        work.report(done, 20 * sum(CHARACTERS.values()))
            if len(drawings) - before != expected:
                raise BilevelError(
                    f"{path} holds {len(drawings) - before} characters where Omniglot has {expected}; it is "
                    "incomplete. Download it again."
                )
        work.report(done, done)
        classes = sorted(drawings)
        short = [name for name in classes if len(drawings[name]) != 20]
        if short:
            raise BilevelError(
                f"Omniglot's {short[0]} has {len(drawings[short[0]])} drawings instead of 20; the download is "
                "incomplete. Download it again."
            )
        images = np.concatenate([np.stack(drawings[name]) for name in classes])[..., None]
        return DecodedImages(images, np.repeat(np.arange(len(classes)), 20), {"classes": classes})

    def splits(self, meta: Mapping[str, Any]) -> Splits:
        order = shuffled(len(meta["classes"]), self.seed)
        return {"train": sorted(order[:1200]), "val": sorted(order[1200:1300]), "test": sorted(order[1300:])}

    def check(self, root: Path, work: Workspace) -> str:
        for path in self.files(root):
            verify(path)
        return f"{super().check(root, work)}, and the drawings are the official ones"

    def fetch(self, root: Path, progress: bool | None = None) -> list[Path]:
        paths = []
        for name in SETS:
            found = locate(root, self.name, name)
            if found is None:
                target = root / self.name / f"{name}.zip"
                found = download.fetch(ADDRESS + target.name, target, partial(verify, name=name), 64 * 2**20, progress)
            paths.append(found)
        return paths


def drawing(contents: bytes, name: str) -> NDArray[np.uint8]:
    """A drawing at its full 105×105, ink = 255."""
    pixels = np.asarray(open_picture(contents, name).convert("L"))
    if pixels.shape != (FULL, FULL):
        raise BilevelError(f"The drawing {name} is {pixels.shape[1]}×{pixels.shape[0]}; Omniglot's are {FULL}×{FULL}.")
    return np.where(pixels < 128, np.uint8(255), np.uint8(0))


def pixels_digest(path: Path, name: str | None = None) -> str:
    """SHA-256 over the names and pixels of all drawings in a zip file or folder."""
    digest = hashlib.sha256()
    with open_tree(path, LIMITS, top=name) as tree:
        for file in tree.names:
            if DRAWING.match(file):
                ink = drawing(tree.read(file), tree.describe(file)) > 0
                digest.update(file.encode() + b"\0" + np.packbits(ink).tobytes())
    return digest.hexdigest()


def verify(path: Path, name: str | None = None) -> None:
    """Raise unless `path` holds exactly the drawings of the official archive of that name."""
    name = name or path.stem
    found = pixels_digest(path, name)
    if found != SHA256[name]:
        raise BilevelError(
            f"{path} does not hold the drawings of Omniglot's {name}.zip (SHA-256 of the pixels {found[:12]}…, "
            f"expected {SHA256[name][:12]}…). Download it again."
        )
