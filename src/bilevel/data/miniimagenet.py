"""MiniImagenet: 100 classes of ImageNet with 600 images each, in Ravi and Larochelle's split (2017)."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bilevel.data.base import Source, Splits
from bilevel.data.cache import DecodedImages, Workspace
from bilevel.data.files import ArchiveLimits, locate, missing, open_tree, read_file
from bilevel.data.preparation import Preparation, prepare
from bilevel.errors import BilevelError

LISTS = ("train", "val", "test")
SIDE = 84
LIMITS = ArchiveLimits(members=200_000, member=32 * 2**20, total=32 * 2**30)
GET = (
    "Make images.zip (or a folder images/) with the 60,000 images named in Ravi and Larochelle's train.csv, val.csv "
    "and test.csv, from ImageNet, whose terms of use you have to accept; image-net.org has the images and the "
    "repository twitter-research/meta-learning-lstm the lists."
)


@dataclass(frozen=True)
class MiniImagenet(Source):
    """Images 84×84 RGB, classes 64/16/20 as listed in the three CSV files (columns filename, label).

    Images of another size are cut to their largest centred square and scaled.

    Args:
        size: pixels per side; 42 makes training four times as fast.
    """

    size: int = SIDE

    name: ClassVar[str] = "miniimagenet"
    version: ClassVar[int] = 1

    def files(self, root: Path) -> list[Path]:
        if self.size < 1:
            raise BilevelError(f"size={self.size} is not an image size; pass a number of pixels, such as 84 or 42.")
        images = locate(root, self.name, "images")
        where = root / self.name if images is None else images.parent
        lists = [where / f"{part}.csv" for part in LISTS]
        lost = ["images.zip (nor folder images/)"] if images is None else []
        lost += [path.name for path in lists if not path.is_file()]
        if lost or images is None:
            raise missing("MiniImagenet", root, lost, self.name, GET)
        return [images, *lists]

    def decode(self, root: Path, work: Workspace) -> DecodedImages:
        images, *lists = self.files(root)
        wanted = [(part, *row) for part, path in zip(LISTS, lists, strict=True) for row in _rows(path)]
        classes = sorted({label for _, _, label in wanted})
        index = {label: number for number, label in enumerate(classes)}
        chosen = {part: sorted({index[label] for where, _, label in wanted if where == part}) for part in LISTS}
        pixels = work.empty((len(wanted), self.size, self.size, 3))
        how = Preparation("photograph", 3, self.size, self.size)
        with open_tree(images, LIMITS) as tree:
            there = set(tree.names)
            for number, (part, name, _) in enumerate(wanted):
                if name not in there:
                    raise BilevelError(f"{part}.csv names {name}, which is not in {images}; the images are incomplete.")
                pixels[number] = prepare(tree.read(name), tree.describe(name), how).image
                if number % 200 == 0:
                    work.report(number, len(wanted))
        work.report(len(wanted), len(wanted))
        labels = np.array([index[label] for _, _, label in wanted], np.int64)
        return DecodedImages(pixels, labels, {"classes": classes, "splits": chosen})

    def splits(self, meta: Mapping[str, Any]) -> Splits:
        return {part: meta["splits"][part] for part in LISTS}


def _rows(path: Path) -> list[tuple[str, str]]:
    try:
        rows = list(csv.DictReader(io.StringIO(read_file(path).decode("utf-8-sig"))))
        pairs = [(row["filename"].strip(), row["label"].strip()) for row in rows]
    except (KeyError, AttributeError, UnicodeDecodeError, csv.Error) as error:
        raise BilevelError(f"{path} is not a list of images; its first line must be filename,label.") from error
    if not pairs:
        raise BilevelError(f"{path} names no images.")
    return pairs
