"""A folder and a zip file of that folder, read the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bilevel.data import places
from bilevel.data.archives import Archive, Limits
from bilevel.errors import BilevelError

# Names of files below a folder, and how to read one of them.
Tree = tuple[list[str], Callable[[str], bytes], Callable[[str], str]]


def locate(root: Path, folder: str, name: str) -> Path | None:
    """`name` as a folder or as name.zip, in `folder` below the data root or in the data root itself."""
    for place in (root / folder, root):
        for candidate in (place / name, place / f"{name}.zip"):
            if candidate.is_dir() if candidate.suffix != ".zip" else candidate.is_file():
                return candidate
    return None


def missing(title: str, root: Path, files: list[str], where: str, get: str) -> BilevelError:
    """The one error for files that are not there: what was looked for, where, and what to do."""
    return BilevelError(
        f"{title} was not found: there is no {' and no '.join(files)} in {root / where}. {get} Put it into "
        f"{root / where}. Looked in {places.say(root)}."
    )


@contextmanager
def opened(path: Path, limits: Limits | None = None, top: str | None = None) -> Iterator[Tree]:
    """The names below `path` (relative to it; in a zip, to its top folder, which has the zip's name unless `top` says
    otherwise), a reader for them, and how to call one of them in a message."""
    if path.is_dir():
        names = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
        yield names, lambda name: read_file(path / name), lambda name: str(path / name)
        return
    with Archive(path, limits) as archive:
        inside = {name.removeprefix(f"{top or path.stem}/"): name for name in archive.names()}
        yield sorted(inside), lambda name: archive.read(inside[name]), lambda name: f"{inside[name]} in {path}"


def read_file(path: Path) -> bytes:
    """The contents of a file; one that cannot be read is named."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise BilevelError(f"{path} cannot be read: {error.strerror or error}.") from error
