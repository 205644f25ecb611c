"""Downloads, made only when the user asks: to a temporary name, verified, then renamed."""

from __future__ import annotations

import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

from bilevel.data.cache import report_bar
from bilevel.errors import BilevelError

SECONDS = 30
CHUNK = 2**16


def fetch(address: str, target: Path, verify: Callable[[Path], None], limit: int, progress: bool | None = None) -> Path:
    """Download `address` to `target`. A file that fails `verify` or is incomplete never gets that name.

    Args:
        address: https only.
        target: where the file goes; its folder is made.
        verify: raises a BilevelError when the file at the path it is given is not what was wanted.
        limit: the largest number of bytes that are accepted.
        progress: whether to show a bar; by default on a terminal, and a line a minute elsewhere.
    """
    if not address.startswith("https://"):
        raise BilevelError(f"{address} is not fetched: only https addresses are.")
    temporary = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{target.stem}-", suffix=target.suffix, dir=target.parent)
        temporary = Path(name)
        with os.fdopen(handle, "wb") as file, urllib.request.urlopen(address, timeout=SECONDS) as answer:
            total = int(answer.headers.get("Content-Length") or 0)
            done = 0
            with report_bar(f"downloading {target.name}", progress) as report:
                while chunk := answer.read(CHUNK):
                    done += len(chunk)
                    if done > limit:
                        raise BilevelError(f"{address} sent more than {limit:,} bytes; the download was given up.")
                    file.write(chunk)
                    report(done, total or limit)
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
