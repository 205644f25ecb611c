"""Where data is looked for, and where decoded images are kept."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from bilevel.errors import BilevelError


def data_root(option: str | Path | None = None) -> Path:
    """The folder of data sets: the option, else BILEVEL_DATA, else a folder of the user's. It is only read."""
    given = option if option is not None else os.environ.get("BILEVEL_DATA") or None
    return Path(given).expanduser().absolute() if given is not None else _user_cache() / "data"


def cache_root() -> Path:
    """Where decoded images are written: BILEVEL_CACHE, else a folder of the user's; never inside the data root, which
    may be read-only."""
    given = os.environ.get("BILEVEL_CACHE")
    return Path(given).expanduser().absolute() if given else _user_cache() / "images"


def describe(root: Path) -> str:
    """The data root and how it was chosen, for messages."""
    return f"{root} (the data root; set it with --data-root, data_root=… or BILEVEL_DATA)"


def _user_cache() -> Path:
    try:
        home = Path.home()
    except RuntimeError as error:
        raise BilevelError(
            "There is no home folder to keep data in; set the environment variables BILEVEL_DATA and BILEVEL_CACHE."
        ) from error
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "bilevel"
