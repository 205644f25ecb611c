"""Data sets: what they consist of, and how they are found, decoded once and opened."""

from __future__ import annotations

import importlib
import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from bilevel import discovery, extras
from bilevel.data import places
from bilevel.data.cache import DecodedImages, Workspace, cached
from bilevel.errors import BilevelError, BilevelWarning

if TYPE_CHECKING:
    from bilevel.data.preparation import Kind, Preparation

Splits: TypeAlias = Mapping[str, Sequence[int]]


@dataclass(frozen=True, eq=False)
class ImageDataset:
    """Labelled images, and classes that are split into disjoint sets for meta-learning.

    Args:
        name: what the data set is called in messages and model cards.
        images: uint8, N×H×W×C; usually memory-mapped, so opening costs nothing.
        labels: N integers, the class of every image.
        classes: the name of every class.
        splits: the class indices of "train", "val" and "test", disjoint.
        parts: sets of examples that come with the data, by name (MNIST's official "train" and "test").
        notes: sentences about conversions of the images and files that were left out.
        fingerprint: changes when the images do.
        preparation: how a picture is converted to an image like these; None if that is not known.

    >>> data = ImageDataset("noise", np.zeros((4, 2, 2, 1), np.uint8), np.array([0, 0, 1, 1]), ("a", "b"))
    >>> len(data), data.shape, data.splits["train"]
    (4, (2, 2, 1), (0, 1))
    """

    name: str
    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    splits: Splits = field(default_factory=dict)
    parts: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    fingerprint: str = ""
    preparation: Preparation | None = None

    def __post_init__(self) -> None:
        splits = self.splits or {"train": range(len(self.classes))}
        object.__setattr__(self, "splits", {name: tuple(int(c) for c in chosen) for name, chosen in splits.items()})
        _check(self)

    def __len__(self) -> int:
        return len(self.images)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels of an image."""
        height, width, channels = self.images.shape[1:]
        return height, width, channels

    def describe(self) -> str:
        """One line for a listing or a log."""
        height, width, channels = self.shape
        split = ", ".join(f"{len(chosen)} {name}" for name, chosen in self.splits.items())
        return f"{self.name}: {len(self):,} images {height}×{width}×{channels}, {len(self.classes):,} classes ({split})"


@dataclass(frozen=True)
class Source(ABC):
    """How one data set is read. A file of this folder that defines a subclass adds a data set.

    The fields are the settings; those named in `after` change how classes are split and not how images are decoded, so
    they share one cache entry.

    Class attributes:
        name: what `load` calls it.
        version: increase it when `decode` writes something else; older cache entries are then not used.
        needs_files: False if the data root need not hold anything.
        pictures: the kind of its pictures, and so how other pictures are prepared.
    """

    name: ClassVar[str] = ""
    version: ClassVar[int] = 1
    needs_files: ClassVar[bool] = True
    after: ClassVar[tuple[str, ...]] = ("seed",)
    pictures: ClassVar[Kind] = "photograph"

    @abstractmethod
    def files(self, root: Path) -> list[Path]:
        """The files or folders this is read from. Missing ones are a BilevelError that says what to get."""

    @abstractmethod
    def decode(self, root: Path, work: Workspace) -> DecodedImages:
        """Read and decode everything, and call `work.report(done, total)` for the progress bar."""

    @abstractmethod
    def splits(self, meta: Mapping[str, Any]) -> Splits:
        """The class indices of "train", "val" and "test", from what `decode` kept."""

    def fetch(self, root: Path, progress: bool | None = None) -> list[Path]:
        """Download the files. A source without a downloader raises an error that says where to get them."""
        self.files(root)
        raise BilevelError(f"{self.name} has no downloader. Its files are already at {places.describe(root)}.")

    def check(self, root: Path, work: Workspace) -> str:
        """Read every file again, without the cache. Return a sentence about what was found, or raise."""
        made = self.decode(root, work)
        return f"{len(made.images):,} images of {len(made.meta['classes']):,} classes, every one readable"

    def load(self, data_root: str | Path | None = None, progress: bool | None = None) -> ImageDataset:
        """Open the data set, decoding it first if that was not done before.

        Args:
            data_root: where the files are; by default the environment variable BILEVEL_DATA, else a user folder.
            progress: whether to show a bar while decoding; by default on a terminal, and a line a minute elsewhere.
        """
        root = places.data_root(data_root)
        settings = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in self.after}
        key = {"name": self.name, "version": self.version, "settings": json.loads(json.dumps(settings, default=str))}
        sources = self.files(root)
        entry = cached(self.name, key, sources, lambda work: self.decode(root, work), progress)
        notes = tuple(entry.meta.get("notes", ()))
        if entry.fresh and notes:
            # A user sees the notes once, when the images are decoded.
            warnings.warn(
                f"{self.name} {', '.join(map(str, sources))}: {' '.join(notes)}", BilevelWarning, stacklevel=3
            )
        return ImageDataset(
            name=self.name,
            images=entry.images,
            labels=entry.labels,
            classes=tuple(entry.meta["classes"]),
            splits=self.splits(entry.meta),
            parts={name: np.asarray(rows, dtype=np.int64) for name, rows in self.parts(entry.meta).items()},
            notes=notes,
            fingerprint=entry.fingerprint,
            preparation=self.preparation(entry.images.shape[1:]),
        )

    def parts(self, meta: Mapping[str, Any]) -> Mapping[str, Any]:
        return {}

    def preparation(self, shape: Sequence[int]) -> Preparation | None:
        """How a picture is converted to an image (height, width, channels) of this data set; None: not known."""
        from bilevel.data.preparation import Preparation  # needs Pillow, which is optional

        height, width, channels = shape
        return Preparation(self.pictures, channels, height, width)


def find() -> dict[str, type[Source]]:
    """Every data set in this folder, by name."""
    extras.require("PIL", "matplotlib", extra="learn", purpose="Finding a data set")
    found = discovery.classes(importlib.import_module("bilevel.data"), Source)  # type: ignore[type-abstract]
    return dict(sorted((kind.name, kind) for kind in found.values()))


def load(
    name_or_path: str | Path,
    data_root: str | Path | None = None,
    progress: bool | None = None,
    download: bool = False,
    **settings: Any,
) -> ImageDataset:
    """Open a data set by name ("omniglot", "glyphs", …), or any folder of class folders by its path.

    Args:
        name_or_path: a name that `find()` lists, or a folder.
        data_root: where the files are; by default the environment variable BILEVEL_DATA, else a user folder.
        progress: whether to show a bar while decoding; by default on a terminal, and a line a minute elsewhere.
        download: fetch missing files first, for data sets that have a downloader.
        settings: fields of the source, such as `seed` of the class split or `size` of a folder's images.
    """
    wanted = source(name_or_path, settings)
    if download:
        wanted.fetch(places.data_root(data_root), progress)
    return wanted.load(data_root, progress)


def source(name_or_path: str | Path, settings: Mapping[str, Any]) -> Source:
    """The source of that name, or of the folder at that path, with these settings."""
    known = find()
    name = str(name_or_path)
    kind, given = known.get(name.lower()), dict(settings)
    if kind is None or isinstance(name_or_path, Path) or kind.name == "folder":
        if not Path(name).expanduser().is_dir():
            raise BilevelError(
                f"{name!r} is neither a data set nor a folder. Pass one of "
                f"{', '.join(n for n in known if n != 'folder')}, or the path of a folder that holds one folder of "
                "images per class."
            )
        kind, given = known["folder"], {"path": Path(name).expanduser(), **given}
    legal = [f.name for f in fields(kind)]
    unknown = [key for key in given if key not in legal]
    if unknown:
        raise BilevelError(
            f"load({name!r}) has no setting {', '.join(map(repr, unknown))}; its settings are {', '.join(legal)}."
        )
    return kind(**given)


def _check(data: ImageDataset) -> None:
    if data.images.ndim != 4 or data.images.dtype != np.uint8:
        raise BilevelError(
            f"images of {data.name} are {data.images.dtype}{list(data.images.shape)}; pass uint8 N×H×W×C, values 0…255."
        )
    if data.labels.shape != (len(data.images),) or not np.issubdtype(data.labels.dtype, np.integer):
        raise BilevelError(
            f"labels of {data.name} are {data.labels.dtype}{list(data.labels.shape)} for {len(data.images)} images; "
            "pass one integer per image."
        )
    count = len(data.classes)
    if len(data.labels) and not 0 <= int(data.labels.min()) <= int(data.labels.max()) < count:
        raise BilevelError(
            f"labels of {data.name} go from {data.labels.min()} to {data.labels.max()}, but there are {count} classes; "
            f"they must be 0…{count - 1}."
        )
    chosen = [label for split in data.splits.values() for label in split]
    if len(set(chosen)) != len(chosen) or not all(0 <= label < count for label in chosen):
        raise BilevelError(f"The splits of {data.name} must be disjoint lists of class indices 0…{count - 1}.")
