"""Reading archives that nobody vouches for: no path escapes, no bombs, and a damaged file is named.

Members are read into memory and never extracted, so a hostile name could do no harm; it is refused all the same,
because an archive that has one is not the archive that was wanted.
"""

from __future__ import annotations

import gzip
import stat
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType

from bilevel.errors import BilevelError

# A read error inside an archive: checksums, truncated streams, broken headers, unsupported compression, encryption.
DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError, ValueError)


@dataclass(frozen=True)
class Limits:
    """How much an archive may hold: members, bytes in one member, bytes in all, and expansion (for members above 1 MB,
    since small ones may compress very well)."""

    members: int = 500_000
    member: int = 64 * 2**20
    total: int = 16 * 2**30
    ratio: float = 200.0


class Archive:
    """A zip file whose directory was checked before anything is read. Use it in a `with` block.

    Args:
        path: the file.
        limits: what is still believable for this data set.
    """

    def __init__(self, path: Path, limits: Limits | None = None) -> None:
        self.path = path
        limits = limits or Limits()
        try:
            self._zip = zipfile.ZipFile(path)
        except DAMAGE as error:
            raise BilevelError(
                f"{path} is not a readable zip file ({error}); it is probably truncated. Download it again."
            ) from error
        try:
            self._members = {info.filename: info for info in self._checked(limits)}
        except BilevelError:
            self._zip.close()
            raise

    def names(self) -> list[str]:
        """The files inside, sorted."""
        return sorted(self._members)

    def read(self, name: str) -> bytes:
        """The contents of one member."""
        try:
            return self._zip.read(self._members[name])
        except KeyError:
            raise BilevelError(f"{self.path} has no member {name!r}; download it again.") from None
        except DAMAGE as error:
            raise BilevelError(f"{name!r} in {self.path} is damaged ({error}). Download the archive again.") from error

    def _checked(self, limits: Limits) -> list[zipfile.ZipInfo]:
        infos = [info for info in self._zip.infolist() if not info.is_dir()]
        if len(infos) > limits.members:
            raise BilevelError(f"{self.path} has {len(infos):,} members; at most {limits.members:,} are read.")
        seen: set[str] = set()
        total = 0
        for info in infos:
            problem = _hostile(info, limits)
            if info.filename in seen:
                problem = "appears twice"
            if problem:
                raise BilevelError(
                    f"{self.path} is refused: its member {info.filename!r} {problem}. Get the archive from its "
                    "official source."
                )
            seen.add(info.filename)
            total += info.file_size
        if total > limits.total:
            raise BilevelError(
                f"{self.path} is refused: it expands to {total:,} bytes, and at most {limits.total:,} are read."
            )
        return infos

    def __enter__(self) -> Archive:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._zip.close()


def _hostile(info: zipfile.ZipInfo, limits: Limits) -> str:
    """What is wrong with a member, or nothing."""
    # `orig_filename` is the name as stored: zipfile itself already cuts at a NUL and turns separators.
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
    """The contents of a .gz file, at most `limit` bytes of it."""
    try:
        with gzip.open(path) as file:
            contents = file.read(limit + 1)
    except DAMAGE as error:
        raise BilevelError(
            f"{path} is not a readable gzip file ({error}); it is probably truncated. Download it again."
        ) from error
    if len(contents) > limit:
        raise BilevelError(f"{path} is refused: it expands to more than {limit:,} bytes.")
    return contents
