"""The files of a data set, in a folder or in a zip file of that folder.

Zip files may come from unknown people. Their directory is checked before anything is read, and members are read into
memory, never extracted.
"""

from __future__ import annotations

import stat
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from bilevel.data import places
from bilevel.errors import BilevelError

# Errors of reading an archive: checksums, truncated streams, broken headers, unknown compression, encryption.
DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError, ValueError)

# Bytes of a zip file's last record: 22, and a comment.
LONGEST_END = 22 + 2**16


@dataclass(frozen=True)
class ArchiveLimits:
    """The largest zip file that is read: members, bytes of a member, bytes of all, and the ratio by which a member
    above 1 MB may expand."""

    members: int = 500_000
    member: int = 64 * 2**20
    total: int = 16 * 2**30
    ratio: float = 200.0


@dataclass(frozen=True)
class FileTree:
    """Sorted names relative to the folder, `read(name)` for the contents, `describe(name)` for messages."""

    names: list[str]
    read: Callable[[str], bytes]
    describe: Callable[[str], str]


@contextmanager
def open_tree(path: Path, limits: ArchiveLimits | None = None, top: str | None = None) -> Iterator[FileTree]:
    """The files below a folder, or those of a zip file.

    Args:
        path: a folder, or a zip file.
        limits: what a zip file may hold.
        top: the folder inside the zip file; by default it has the zip file's name.
    """
    if path.is_dir():
        names = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
        yield FileTree(names, lambda name: read_file(path / name), lambda name: str(path / name))
        return
    try:
        archive = zipfile.ZipFile(path)
    except DAMAGE as error:
        raise BilevelError(
            f"{path} is not a readable zip file ({error}); it is probably truncated. Download it again."
        ) from error
    with archive:
        members = _checked(path, archive, limits or ArchiveLimits())
        inside = {info.filename.removeprefix(f"{top or path.stem}/"): info for info in members}

        def read(name: str) -> bytes:
            if name not in inside:
                raise BilevelError(f"{path} has no member {name!r}; download it again.")
            try:
                return archive.read(inside[name])
            except DAMAGE as error:
                raise BilevelError(f"{name!r} in {path} is damaged ({error}). Download the archive again.") from error

        yield FileTree(sorted(inside), read, lambda name: f"{inside[name].filename} in {path}")


def _checked(path: Path, archive: zipfile.ZipFile, limits: ArchiveLimits) -> list[zipfile.ZipInfo]:
    """The members that are files. A member that no official archive would have is an error that names it."""
    listed = archive.infolist()
    announced = _announced(path)
    if announced is not None and announced != len(listed):
        raise BilevelError(
            f"{path} is damaged: it announces {announced:,} members and lists {len(listed):,}. Download it again."
        )
    members = [info for info in listed if not info.filename.endswith("/")]
    if len(members) > limits.members:
        raise BilevelError(f"{path} has {len(members):,} members; at most {limits.members:,} are read.")
    seen: set[str] = set()
    for info in members:
        problem = "appears twice" if info.filename in seen else _refusal(info, limits)
        if problem:
            raise BilevelError(
                f"{path} is refused: its member {info.filename!r} {problem}. Get the archive from its official source."
            )
        seen.add(info.filename)
    total = sum(info.file_size for info in members)
    if total > limits.total:
        raise BilevelError(f"{path} is refused: it expands to {total:,} bytes, and at most {limits.total:,} are read.")
    return members


def _announced(path: Path) -> int | None:
    """The number of members in the record at the end of the archive, which zipfile does not check; None if it is too
    large for the record."""
    with open(path, "rb") as file:
        file.seek(-min(LONGEST_END, path.stat().st_size), 2)
        end = file.read()
    place = end.rfind(b"PK\5\6")
    count = int.from_bytes(end[place + 10 : place + 12], "little")
    return None if place < 0 or count == 0xFFFF else count


def _refusal(info: zipfile.ZipInfo, limits: ArchiveLimits) -> str:
    """Why a member is refused, or "" if it is not."""
    # `orig_filename` is the name as stored; in `filename`, zipfile has already cut at NUL and replaced separators.
    name = info.orig_filename
    parts = PurePosixPath(name.replace("\\", "/")).parts
    if "\0" in name or "\\" in name or name.startswith("/") or ".." in parts or ":" in (parts[0] if parts else ":"):
        return "points outside the archive's folder"
    if stat.S_ISLNK(info.external_attr >> 16):
        return "is a symbolic link"
    if info.flag_bits & 0x1:
        return "is encrypted"
    if info.file_size > limits.member:
        return f"expands to {info.file_size:,} bytes (at most {limits.member:,} are read)"
    if info.file_size > 2**20 and info.file_size > limits.ratio * max(info.compress_size, 1):
        return f"expands {info.file_size // max(info.compress_size, 1)}-fold, as a decompression bomb does"
    return ""


def gunzip(path: Path, limit: int) -> bytes:
    """The contents of a .gz file of at most `limit` bytes, which must be one whole stream and nothing else."""
    stream = zlib.decompressobj(wbits=31)  # 31: with gzip's header and checksum
    try:
        contents = stream.decompress(read_file(path), limit + 1)
    except zlib.error as error:
        raise BilevelError(f"{path} is not a readable gzip file ({error}). Download it again.") from error
    if len(contents) > limit:
        raise BilevelError(f"{path} is refused: it expands to more than {limit:,} bytes.")
    if not stream.eof or stream.unused_data:
        what = "something follows its end" if stream.eof else "its end is missing; it is probably truncated"
        raise BilevelError(f"{path} is not a readable gzip file ({what}). Download it again.")
    return contents


def read_file(path: Path) -> bytes:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a FIFO would wait for a writer, a device may have no end
            raise BilevelError(f"{path} cannot be read: it is not a regular file.")
        return path.read_bytes()
    except OSError as error:
        raise BilevelError(f"{path} cannot be read: {error.strerror or error}.") from error


def locate(root: Path, folder: str, name: str) -> Path | None:
    """`name` as a folder or as name.zip, in `folder` below the data root or in the data root itself."""
    for place in (root / folder, root):
        if (place / name).is_dir():
            return place / name
        if (place / f"{name}.zip").is_file():
            return place / f"{name}.zip"
    return None


def missing(title: str, root: Path, names: list[str], where: str, get: str) -> BilevelError:
    """The error for files that are not there: which files, where they belong, and how to get them."""
    return BilevelError(
        f"{title} was not found: there is no {' and no '.join(names)} in {root / where}. {get} Put it into "
        f"{root / where}. Looked in {places.describe(root)}."
    )
