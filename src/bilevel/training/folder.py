"""The folder of a run, and the right to write to it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from bilevel.errors import BilevelError
from bilevel.training.checkpoints import Checkpoints
from bilevel.training.files import read_json, write_bytes, write_json


@dataclass(frozen=True)
class RunFolder:
    """`config.json`, `metrics.jsonl`, `last.safetensors`, `best.safetensors`, `checkpoints/`, and `events/`."""

    path: Path

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    @property
    def last(self) -> Path:
        return self.path / "last.safetensors"

    @property
    def best(self) -> Path:
        return self.path / "best.safetensors"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events"

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.path / "checkpoints")

    def exists(self) -> bool:
        return self.config_file.exists()

    def config(self) -> dict[str, Any]:
        if not self.exists():
            raise BilevelError(f"{self.path} holds no run: there is no config.json in it.")
        config = read_json(self.config_file)
        if not isinstance(config, dict) or not isinstance(config.get("settings"), dict):
            raise BilevelError(f"{self.config_file} is not the configuration of a run: it has no settings.")
        return config

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else writes here meanwhile. The lock is the operating system's, so it ends with the process."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.path / ".lock")
            lock.acquire(timeout=0)
        except Timeout as error:
            raise BilevelError(
                f"Another run is writing to {self.path}. Wait for it, stop it, or choose another folder with --out DIR."
            ) from error
        except OSError as error:
            raise BilevelError(
                f"The run cannot be written to {self.path}: {error.strerror or error}. Choose another folder with "
                "--out DIR."
            ) from error
        self._sweep()
        try:
            yield
        finally:
            lock.release()

    def _sweep(self) -> None:
        """Remove what a process left that was killed while it wrote; see `write_bytes`."""
        for folder in (self.path, self.checkpoints.folder):
            for scratch in folder.glob(".*.*.*"):
                with contextlib.suppress(OSError):
                    scratch.unlink()

    def begin(self, config: Mapping[str, Any]) -> None:
        """Write down what this run is; a folder that holds one already is left alone."""
        if self.exists():
            raise BilevelError(
                f"{self.path} holds a run already. Continue it with --resume, or choose another folder with --out DIR."
            )
        write_json(self.config_file, config)

    def forget_after(self, iteration: int) -> None:
        """Drop the metrics of hyperiterations that will be run again."""
        if self.metrics.exists():
            kept = [line for line in read_metrics(self.metrics) if line.get("iteration", 0) <= iteration]
            write_bytes(self.metrics, "".join(json.dumps(line) + "\n" for line in kept).encode())


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`; one that a crash cut short is left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def differences(before: Mapping[str, Any], now: Mapping[str, Any], free: set[str]) -> list[str]:
    """What two configurations disagree in, one phrase each; settings in `free` may change.

    >>> differences({"ways": 5, "seed": 0}, {"ways": 20, "seed": 0}, free=set())
    ['ways: 5 there, 20 here']
    """
    keys = [*before, *(key for key in now if key not in before)]
    return [
        f"{key}: {before.get(key, 'not set')} there, {now.get(key, 'not set')} here"
        for key in keys
        if key not in free and before.get(key) != now.get(key)
    ]
