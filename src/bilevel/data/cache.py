"""Decoded images on disk: written once, memory-mapped afterwards.

Invariant: a folder that has its final name is complete. It is filled under a temporary name, flushed to disk and then
renamed. A killed process leaves nothing that a later one reads. If two processes decode the same data, the one that
finishes first wins, and both read its folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from bilevel.data import places
from bilevel.errors import BilevelError
from bilevel.progress import bar

LAYOUT = 1
IMAGES, LABELS, META = "images.npy", "labels.npy", "meta.json"
ABANDONED_SECONDS = 24 * 3600


@dataclass
class DecodedImages:
    """What a source decodes its files to.

    Args:
        images: uint8, N×H×W×C.
        labels: N integers.
        meta: what else is kept, as JSON: the names of the classes, notes.
        fingerprint: a digest of images, labels and names; set by the cache.
        fresh: whether they were decoded just now; set by the cache.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    meta: dict[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    fresh: bool = False


@dataclass(frozen=True)
class Workspace:
    """What `Source.decode` works with.

    Args:
        report: `report(done, total)` moves the progress bar.
        folder: where `empty` puts its array; None keeps the array in memory.
    """

    report: Callable[[int, int], None] = lambda done, total: None
    folder: Path | None = None

    def empty(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """An array for the images, to be filled; called at most once."""
        if self.folder is None:
            return np.empty(shape, np.uint8)
        with _explained(self.folder.parent):
            array = np.lib.format.open_memmap(self.folder / IMAGES, mode="w+", dtype=np.uint8, shape=shape)
            if hasattr(os, "posix_fallocate"):
                # Without this, writing to a mapped file on a full disk would kill the process.
                with open(self.folder / IMAGES, "r+b") as file:
                    os.posix_fallocate(file.fileno(), 0, array.offset + array.nbytes)
            return array


def cached(
    name: str,
    key: Mapping[str, Any],
    sources: Sequence[Path],
    decode: Callable[[Workspace], DecodedImages],
    progress: bool | None = None,
) -> DecodedImages:
    """The decoded images of `sources` from the cache, decoding them if they are not there.

    Args:
        name: begins the name of the cache entry.
        key: what the result depends on apart from the sources.
        sources: files or folders; another path, size or time of change is another entry.
        decode: called if they are not in the cache.
        progress: whether to show a bar; by default on a terminal, and a line a minute elsewhere.
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


def content(made: DecodedImages) -> str:
    """A digest of images, labels and names of classes, which is the same on all machines."""
    digest = hashlib.sha256(json.dumps([made.images.shape, made.meta.get("classes")]).encode())
    digest.update(made.labels.astype("<i8").tobytes())
    for start in range(0, len(made.images), 1024):  # all at once may not fit into memory
        digest.update(np.ascontiguousarray(made.images[start : start + 1024]).tobytes())
    return digest.hexdigest()


def _open(folder: Path) -> DecodedImages | None:
    """The entry, or None; a damaged entry is removed."""
    if not folder.is_dir():
        return None
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        images = np.load(folder / IMAGES, mmap_mode="r")
        labels = np.load(folder / LABELS)
        if list(images.shape) != meta["shape"] or len(labels) != len(images):
            raise ValueError("shapes differ")
        return DecodedImages(images, labels, meta["meta"], fingerprint=meta["content"])
    except (FileNotFoundError, ValueError, KeyError, EOFError):
        shutil.rmtree(folder, ignore_errors=True)
        return None
    except OSError as error:
        raise BilevelError(
            f"The cache entry {folder} cannot be read: {error.strerror or error}. Set the environment variable "
            "BILEVEL_CACHE to a folder of your own."
        ) from error


def _make(folder: Path, decode: Callable[[Workspace], DecodedImages], progress: bool | None) -> None:
    """Decode under a temporary name and rename. The temporary folder is removed whatever happens."""
    root = folder.parent
    with _explained(root):
        root.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(root)
        temporary = root / f".{folder.name}-{uuid.uuid4().hex}"
        temporary.mkdir()
    try:
        with report_bar(f"preparing {folder.name.rpartition('-')[0]}", progress) as report:
            made = decode(Workspace(report, temporary))
        facts = {"shape": list(made.images.shape), "content": content(made), "meta": made.meta}
        with _explained(root):
            if isinstance(made.images, np.memmap):
                made.images.flush()
            else:
                _write(temporary / IMAGES, lambda file: np.save(file, np.ascontiguousarray(made.images)))
            _write(temporary / LABELS, lambda file: np.save(file, made.labels.astype(np.int64)))
            _write(temporary / META, lambda file: file.write(json.dumps(facts, ensure_ascii=False).encode()))
            made.images = made.images[:0].copy()  # some systems refuse to rename a folder that holds a mapped file
            try:
                os.replace(temporary, folder)
            except OSError:
                # Another process finished first. Its entry has the same key and therefore the same images.
                if not folder.is_dir():
                    raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(path: Path, write: Callable[[BinaryIO], object]) -> None:
    with open(path, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _explained(root: Path) -> Iterator[None]:
    """Turn an error of the disk inside the block into a message that says what to do."""
    try:
        yield
    except OSError as error:
        raise BilevelError(
            f"Decoded images cannot be written to {root}: {error.strerror or error}. Free some space, or set the "
            "environment variable BILEVEL_CACHE to another folder."
        ) from error


def _remove_abandoned(root: Path) -> None:
    """Remove the temporary folders of killed processes, a day after the last change."""
    for path in root.glob(".*-*"):
        with contextlib.suppress(OSError):
            if path.is_dir() and time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def report_bar(title: str, show: bool | None) -> Iterator[Callable[[int, int], None]]:
    """`report(done, total)` as a progress bar."""
    with bar(title, None, show=show) as advance:
        yield lambda done, total: advance(done, total=total)
