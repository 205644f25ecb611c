"""The figures as they are stored: everything that is shown is computed from these, so a report can be made again at any
time."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from harness.environments import ROOT
from harness.memory import Memory
from harness.ranks import Throughput
from harness.timing import Timing


class Results:
    """The measured sections, those of earlier runs into the same folder included."""

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

    def timings(self, section: str, key: str = "timings") -> list[Timing]:
        known = {field.name for field in dataclasses.fields(Timing)}
        rows = self.sections.get(section, {}).get(key, [])
        return [Timing(**{k: v for k, v in row.items() if k in known}) for row in rows]

    def memory(self) -> list[Memory]:
        return [Memory(**row) for row in self.sections.get("memory", {}).get("memory", [])]

    def ranks(self) -> list[Throughput]:
        return [Throughput(**row) for row in self.sections.get("hyper", {}).get("ranks", [])]

    def by_case(self, *sections: str) -> dict[str, list[Timing]]:
        """The timings of some sections, case by case."""
        found: dict[str, list[Timing]] = {}
        for section in sections:
            for timing in self.timings(section):
                found.setdefault(timing.case, []).append(timing)
        return found


def fastest(timings: list[Timing], belongs: Callable[[Timing], bool]) -> Timing | None:
    """The fastest of those that took part."""
    return min((t for t in timings if t.rounds and belongs(t)), key=lambda t: t.minimum, default=None)


def baseline(timings: list[Timing]) -> Timing | None:
    """What ratios are taken against: the fastest torch peer, or the loop by hand where no peer could be installed."""
    return fastest(timings, lambda t: t.group == "torch peer") or fastest(timings, lambda t: t.group == "by hand")


def machine() -> dict[str, Any]:
    """Where and when a section was measured."""
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
    """The version of the package that was measured, with a plus where its files differ from the commit."""

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
