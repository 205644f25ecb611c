"""Files that are replaced as a whole: bytes and JSON, written atomically."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from bilevel.errors import BilevelError

# The key of sealed JSON that holds the digest of all other entries.
CHECKSUM = "checksum"


class NotWritten(BilevelError):
    """A file could not be written; what was there before is unchanged."""


def not_written(path: Path, error: OSError) -> NotWritten:
    return NotWritten(
        f"{path} could not be written: {error.strerror or error}. The file that was there before is unchanged."
    )


def write_bytes(path: Path, content: bytes) -> None:
    """Replace the file as a whole: a reader finds the old content or the new one, even after a crash."""
    scratch = ""
    try:
        handle, scratch = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(scratch, 0o666 & ~_umask())
        os.replace(scratch, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        raise not_written(path, error) from error


def write_json(path: Path, content: Any, *, sealed: bool = False) -> None:
    """Replace the file by this content.

    Args:
        path: the file.
        content: the new content, in JSON's types.
        sealed: add a checksum to an object, so that `read_json` notices damage that is still JSON.
    """
    if sealed:
        content = {**content, CHECKSUM: _digest(content)}
    write_bytes(path, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """The content of the file, without the checksum. A damaged file is a BilevelError that says what is wrong."""
    try:
        # JSON allows integers of any length. Very long ones become infinite floats.
        found = json.loads(path.read_text(encoding="utf-8"), parse_int=lambda x: int(x) if len(x) < 300 else float(x))
    except OSError as error:
        raise BilevelError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise BilevelError(f"{path} is not valid JSON ({error}).") from error
    except RecursionError as error:
        raise BilevelError(f"{path} is JSON that is nested too deeply to be read.") from error
    if isinstance(found, dict) and CHECKSUM in found and found.pop(CHECKSUM) != _digest(found):
        raise BilevelError(
            f"{path} is damaged, or was changed by hand: its content does not match its {CHECKSUM}. Restore it; or, if "
            f"the change is meant, remove the line {CHECKSUM!r} from it."
        )
    return found


def _digest(content: Any) -> str:
    """The digest of the content as it is read back; the order of its keys does not matter."""
    plain = json.loads(json.dumps(content))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
