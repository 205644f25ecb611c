"""The stored figures. All tables and pictures are computed from these, so a report can be written again at any time."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from harness.environments import ROOT
from harness.figures import Figures


class Results:
    """The measured sections, including those of earlier runs with the same folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "results.json"
        self.sections: dict[str, dict[str, Any]] = (
            json.loads(self.path.read_text())["sections"] if self.path.exists() else {}
        )

    def put(self, name: str, figures: dict[str, Any], quick: bool) -> None:
        self.sections[name] = {"machine": machine(), "quick": quick, **figures}

    def save(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"sections": self.sections}, indent=1) + "\n")

    def figures(self, name: str) -> Figures:
        """The figures of one section."""
        return Figures(self.sections[name])


def machine() -> dict[str, Any]:
    """The machine, the versions, the commit, the load and the date of a measurement."""
    import torch

    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def _commit() -> str:
    """The commit of the package that was measured, followed by a plus if the files differ from that commit."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, cwd=ROOT).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "src") else "") or "unknown"
    except OSError:
        return "unknown"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.processor() or "unknown",
    )
