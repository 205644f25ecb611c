"""The commit of the source code, which is stored with results."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit() -> str | None:
    """The commit of the source tree, with "+" where files were changed since; None outside of a repository."""
    here = Path(__file__).parent
    try:
        found = [
            subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, timeout=10, check=True).stdout
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--", "."])
        ]
    except (OSError, subprocess.SubprocessError):
        return None
    return found[0].strip() + ("+" if found[1].strip() else "")
