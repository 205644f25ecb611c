"""Fetching a file, only when the user asked for it: to a temporary name, verified, then renamed."""

from __future__ import annotations

import os
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import nullcontext, suppress
from http.client import HTTPException
from pathlib import Path

from bilevel.errors import BilevelError
from bilevel.progress import bar

SECONDS = 30
CHUNK = 2**16


def fetch(address: str, target: Path, verify: Callable[[Path], None], limit: int, progress: bool | None = None) -> Path:
    """Download `address` to `target`; what fails `verify`, or is cut short, never gets that name.

    Args:
        address: https only.
        target: where the file goes; its folder is made.
        verify: raises a BilevelError when the file at the path it is given is not what was wanted.
        limit: bytes after which the download is given up.
        progress: whether to show a bar; by default, when somebody is looking.
    """
    if not address.startswith("https://"):
        raise BilevelError(f"{address} is not fetched: only https addresses are.")
    show = sys.stderr.isatty() if progress is None else progress
    temporary = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{target.stem}-", suffix=target.suffix, dir=target.parent)
        temporary = Path(name)
        with os.fdopen(handle, "wb") as file, urllib.request.urlopen(address, timeout=SECONDS) as answer:
            total = int(answer.headers.get("Content-Length") or 0)
            with bar(f"downloading {target.name}", total or limit) if show else nullcontext(None) as advance:
                done = 0
                while chunk := answer.read(CHUNK):
                    done += len(chunk)
                    if done > limit:
                        raise BilevelError(f"{address} sent more than {limit:,} bytes; the download was given up.")
                    file.write(chunk)
                    if advance is not None:
                        advance(done)
            if total and done != total:
                raise BilevelError(f"{address} was cut off after {done:,} of {total:,} bytes; try again.")
            file.flush()
            os.fsync(file.fileno())
        verify(temporary)
        os.replace(temporary, target)
    except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError) as error:
        raise BilevelError(
            f"{address} could not be reached ({getattr(error, 'reason', error)}). Without a connection, download it "
            f"elsewhere and put it at {target}."
        ) from error
    except OSError as error:
        raise BilevelError(
            f"{target} cannot be written: {error.strerror or error}. Choose another folder with --data-root or "
            "BILEVEL_DATA."
        ) from error
    finally:
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink()
    return target
