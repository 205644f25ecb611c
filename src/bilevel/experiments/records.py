"""The files that an experiment writes: everything needed to check its numbers and to repeat them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import bilevel
from bilevel.errors import BilevelError


@dataclass(frozen=True)
class ExperimentRecord:
    """The content of `result.json`: what an experiment found, and how to repeat it.

    Attributes:
        result: the fields of the `ExperimentResult`.
        folder: where the file is written; not part of it.
    """

    experiment: str
    summary: str
    paper: str
    command: str
    settings: Mapping[str, Any]
    result: Mapping[str, Any]
    minutes: float
    machine: Mapping[str, Any]
    folder: Path
    finished: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))

    def json(self) -> str:
        values = {**asdict(self), "seed": self.settings.get("seed"), **self.result}
        del values["folder"], values["result"]
        return json.dumps(plain(values), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def plain(value: Any) -> Any:
    """The value in JSON's types. JSON has no NaN and no infinity, so those become strings.

    >>> plain({"T": (10, float("inf"))})
    {'T': [10, 'inf']}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # tensors, arrays and their scalars
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


@contextlib.contextmanager
def staging(out: Path, name: str) -> Iterator[tuple[Path, Callable[[], Path]]]:
    """A scratch folder beside `out/name`, and the function that moves its files there, `result.json` last.

    The folder is made before any work, so that a path that cannot be written is an error at once. An interrupted run
    does not change earlier results.
    """
    try:
        target = out / name
        target.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".writing-", dir=target))
    except OSError as error:
        raise BilevelError(
            f"The results cannot be written to {out / name}: {error.strerror or error}. Pass a folder that can be "
            "written with --out DIR."
        ) from error

    def publish() -> Path:
        files = sorted(scratch.iterdir(), key=lambda file: (file.name == "result.json", file.name))
        try:
            for file in files:
                os.replace(file, target / file.name)
        except OSError as error:
            raise BilevelError(f"The results could not be moved to {target}: {error.strerror or error}.") from error
        return target

    try:
        yield scratch, publish
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        with contextlib.suppress(OSError):
            target.rmdir()  # removes an empty folder only, after a run that failed


def machine() -> dict[str, Any]:
    """The machine, the operating system and the versions of packages."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "numpy": version("numpy"),
        "bilevel": bilevel.__version__,
    }


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
