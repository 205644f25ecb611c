"""Decoded images on disk: written once and all at once, memory-mapped ever after.

Invariant: a folder that has its final name is complete. It is filled under a temporary name, flushed to disk and then
renamed, so a killed process leaves nothing that a later one would read, and of two processes that prepare the same data
one wins and the other uses the winner's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bilevel.data import places
from bilevel.errors import BilevelError
from bilevel.progress import bar

LAYOUT = 1
IMAGES, LABELS, META = "images.npy", "labels.npy", "meta.json"
ABANDONED_SECONDS = 24 * 3600


@dataclass
class Prepared:
    """What a source decodes to: images N×H×W×C, their labels, and what JSON can hold about them. `fingerprint` is a
    digest of all that; `fresh` says that they were decoded just now."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    meta: dict[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    fresh: bool = False


class Workspace:
    """What a source works with while it decodes: `report(done, total)`, and room for many images.

    Args:
        report: moves the progress bar.
        folder: where large arrays are laid out on disk; None keeps them in memory.
    """

    def __init__(self, report: Callable[[int, int], None] | None = None, folder: Path | None = None) -> None:
        self.report = report or (lambda done, total: None)
        self._folder = folder

    def empty(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """The array that will hold the images, to be filled; called at most once."""
        if self._folder is None:
            return np.empty(shape, np.uint8)
        with _named(self._folder.parent):
            array = np.lib.format.open_memmap(self._folder / IMAGES, mode="w+", dtype=np.uint8, shape=shape)
            if hasattr(os, "posix_fallocate"):
                # A mapped file has holes. Filling one when the disk is full would kill the process without a word.
                with open(self._folder / IMAGES, "r+b") as file:
                    os.posix_fallocate(file.fileno(), 0, array.offset + array.nbytes)
            return array


def prepared(
    name: str,
    key: Mapping[str, Any],
    sources: Sequence[Path],
    decode: Callable[[Workspace], Prepared],
    progress: bool | None = None,
) -> Prepared:
    """The decoded images of `sources` from the cache, decoding them if they are not there.

    Args:
        name: begins the name of the cache entry.
        key: what the result depends on apart from the sources.
        sources: files or folders; another path, size or time of change is another entry.
        decode: what to do when they are not there.
        progress: whether to show a bar; by default, when somebody is looking.
    """
    stamp = {"layout": LAYOUT, "key": dict(key), "sources": [fingerprint(source) for source in sources]}
    digest = hashlib.sha256(json.dumps(stamp, sort_keys=True).encode()).hexdigest()
    folder = places.cache_root() / f"{name}-{digest[:20]}"
    found = _open(folder)
    if found is None:
        _make(folder, decode, progress)
        found = _open(folder)
        if found is None:
            raise BilevelError(f"The cache entry {folder} cannot be read back; remove it and try again.")
        found.fresh = True
    return found


def fingerprint(source: Path) -> list[Any]:
    """Path, size and time of change of a file; of a folder, a digest over those of every file below it."""
    if not source.is_dir():
        stat = source.stat()
        return [str(source.resolve()), stat.st_size, stat.st_mtime_ns]
    lines = []
    for parent, folders, files in os.walk(source):
        folders.sort()
        with os.scandir(parent) as entries:
            stats = {entry.name: entry.stat() for entry in entries if entry.is_file()}
        inside = os.path.relpath(parent, source)
        lines += [f"{inside}/{f}:{stats[f].st_size}:{stats[f].st_mtime_ns}" for f in sorted(files) if f in stats]
    digest = hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()
    return [str(source.resolve()), len(lines), digest]


def content(made: Prepared) -> str:
    """A digest of images, labels and names of classes: the same wherever the same data were decoded."""
    digest = hashlib.sha256(json.dumps([made.images.shape, made.meta.get("classes")]).encode())
    digest.update(made.labels.astype("<i8").tobytes())
    for start in range(0, len(made.images), 1024):  # they may be more than fit into memory
        digest.update(np.ascontiguousarray(made.images[start : start + 1024]).tobytes())
    return digest.hexdigest()


def _open(folder: Path) -> Prepared | None:
    """The entry, or None when there is none; an entry that was damaged is removed."""
    if not folder.is_dir():
        return None
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        images = np.load(folder / IMAGES, mmap_mode="r")
        labels = np.load(folder / LABELS)
        if list(images.shape) != meta["shape"] or len(labels) != len(images):
            raise ValueError("shapes differ")
        return Prepared(images, labels, meta["meta"], fingerprint=meta["content"])
    except (FileNotFoundError, ValueError, KeyError, EOFError):
        shutil.rmtree(folder, ignore_errors=True)
        return None
    except OSError as error:
        raise BilevelError(
            f"The cache entry {folder} cannot be read: {error.strerror or error}. Set the environment variable "
            "BILEVEL_CACHE to a folder of your own."
        ) from error


def _make(folder: Path, decode: Callable[[Workspace], Prepared], progress: bool | None) -> None:
    """Decode under a temporary name and rename; whatever goes wrong, the temporary folder is removed."""
    root = folder.parent
    with _named(root):
        root.mkdir(parents=True, exist_ok=True)
        _sweep(root)
        temporary = root / f".{folder.name}-{uuid.uuid4().hex}"
        temporary.mkdir()
    try:
        with bar_of(f"preparing {folder.name.rpartition('-')[0]}", progress) as report:
            made = decode(Workspace(report, temporary))
        with _named(root):
            _save(temporary / IMAGES, made.images)
            _save(temporary / LABELS, made.labels.astype(np.int64))
            with open(temporary / META, "w", encoding="utf-8") as file:
                facts = {"shape": list(made.images.shape), "content": content(made), "meta": made.meta}
                json.dump(facts, file, ensure_ascii=False)
                file.flush()
                os.fsync(file.fileno())
            # Some systems refuse to rename a folder that holds a mapped file.
            del made
            try:
                os.replace(temporary, folder)
            except OSError:
                # Another process finished first. Its entry has the same key, hence the same images.
                if not folder.is_dir():
                    raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _named(root: Path) -> Iterator[None]:
    """A disk that is full or not writable, as a message that says what can be done."""
    try:
        yield
    except OSError as error:
        raise BilevelError(
            f"Decoded images cannot be written to {root}: {error.strerror or error}. Free some space, or set the "
            "environment variable BILEVEL_CACHE to another folder."
        ) from error


def _save(path: Path, array: NDArray[Any]) -> None:
    if isinstance(array, np.memmap) and str(array.filename) == str(path):
        array.flush()  # msync: it is on the disk already
        return
    with open(path, "wb") as file:
        np.save(file, np.ascontiguousarray(array), allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())


def _sweep(root: Path) -> None:
    """Remove what killed processes left behind, once it is old enough to belong to nobody."""
    for path in root.glob(".*-*"):
        with contextlib.suppress(OSError):
            if path.is_dir() and time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def bar_of(title: str, show: bool | None) -> Iterator[Callable[[int, int], None]]:
    """`report(done, total)` for a source: a bar, or nothing when nobody is looking."""
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda done, total: None
        return
    # The total is known only when the source has counted its files.
    with contextlib.ExitStack() as stack:
        advance: list[Callable[..., None]] = []

        def report(done: int, total: int) -> None:
            if not advance:
                advance.append(stack.enter_context(bar(title, total)))
            advance[0](done)

        yield report
