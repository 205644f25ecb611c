"""MNIST: 60,000 + 10,000 handwritten digits (LeCun et al., 1998)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from bilevel.data.base import Source, Splits
from bilevel.data.cache import DecodedImages, Workspace
from bilevel.data.files import gunzip, missing, read_file
from bilevel.data.preparation import Kind
from bilevel.data.splits import split_classes
from bilevel.errors import BilevelError

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
LIMIT = 64 * 2**20


@dataclass(frozen=True)
class MNIST(Source):
    """Digits 28×28. `dataset.parts["train"]` and `["test"]` are the official 60,000 and 10,000 examples.

    Args:
        seed: the seed of the split of the ten digits into 6/2/2 classes, which episodes use.
    """

    seed: int = 0

    name: ClassVar[str] = "mnist"
    pictures: ClassVar[Kind] = "gray-drawing"

    def files(self, root: Path) -> list[Path]:
        found, lost = [], []
        for name in FILES:
            options = [place / f"{name}{end}" for place in (root / self.name, root) for end in (".gz", "")]
            there = next((path for path in options if path.is_file()), None)
            if there is None:
                lost.append(f"{name}.gz")
            else:
                found.append(there)
        if lost:
            get = "Download the four IDX files from a mirror of yann.lecun.com/exdb/mnist."
            raise missing("MNIST", root, lost, self.name, get)
        return found

    def decode(self, root: Path, work: Workspace) -> DecodedImages:
        arrays = []
        for number, path in enumerate(self.files(root)):
            arrays.append(_idx(path, dimensions=3 if "images" in path.name else 1))
            work.report(number + 1, len(FILES))
        train, train_labels, test, test_labels = arrays
        for images, digits, part in ((train, train_labels, "train"), (test, test_labels, "t10k")):
            if len(images) != len(digits):
                raise BilevelError(f"MNIST's {part} files hold {len(images)} images and {len(digits)} labels.")
        labels = np.concatenate([train_labels, test_labels]).astype(np.int64)
        meta = {"classes": [str(digit) for digit in range(10)], "train": len(train), "test": len(test)}
        return DecodedImages(np.concatenate([train, test])[..., None], labels, meta)

    def splits(self, meta: Mapping[str, Any]) -> Splits:
        return split_classes(10, self.seed, (0.6, 0.2, 0.2))

    def parts(self, meta: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"train": np.arange(meta["train"]), "test": np.arange(meta["train"], meta["train"] + meta["test"])}


def _idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    contents = gunzip(path, LIMIT) if path.suffix == ".gz" else read_file(path)
    header = 4 + 4 * dimensions
    # Two zero bytes, 8 for unsigned bytes, the number of dimensions, and each dimension as a big-endian integer.
    if len(contents) < header or contents[:4] != bytes((0, 0, 8, dimensions)):
        raise BilevelError(f"{path} is not an IDX file of {dimensions} dimensions; download it again.")
    shape = [int(size) for size in np.frombuffer(contents, ">u4", dimensions, 4)]
    if len(contents) - header != int(np.prod(shape)):
        raise BilevelError(
            f"{path} announces {'×'.join(map(str, shape))} bytes and holds {len(contents) - header}; download it again."
        )
    return np.frombuffer(contents, np.uint8, offset=header).reshape(shape)
