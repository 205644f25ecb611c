"""The folder of a run, and its lock."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bilevel import extras
from bilevel.errors import BilevelError
from bilevel.files import read_json, write_bytes, write_json
from bilevel.training.checkpoints import Checkpoints
from bilevel.training.log import METRICS, as_line, read_metrics


class RunFolder:
    """`config.json`, `metrics.jsonl`, `last.safetensors`, `best.safetensors`, `checkpoints/`, and `events/`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.json"
        self.metrics = path / METRICS
        self.last = path / "last.safetensors"
        self.best = path / "best.safetensors"
        self.events = path / "events"
        self.checkpoints = Checkpoints(path / "checkpoints")

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
        """Lock the folder for this process. The lock is the operating system's, so it ends with the process."""
        filelock = extras.load("filelock", extra="learn", purpose=f"Locking {self.path}")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(self.path / ".lock")
            lock.acquire(timeout=0)
        except filelock.Timeout as error:
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
        """Remove temporary files of a process that was killed while writing; see `write_bytes`."""
        for folder in (self.path, self.checkpoints.folder):
            for scratch in folder.glob(".*.*.*"):
                with contextlib.suppress(OSError):
                    scratch.unlink()

    def begin(self, config: Mapping[str, Any]) -> None:
        """Write the configuration of a new run; refuse a folder that holds a run already."""
        if self.exists():
            raise BilevelError(
                f"{self.path} holds a run already. Continue it with --resume, or choose another folder with --out DIR."
            )
        write_json(self.config_file, config, sealed=True)

    def forget_after(self, iteration: int, validation: int | None = None) -> None:
        """Drop the metrics of hyperiterations that will be run again.

        Args:
            iteration: the last one that counts.
            validation: the last validation that counts, by default one of that hyperiteration. It is an earlier one if
                the checkpoint was written before the validation.
        """
        if self.metrics.exists():
            last = iteration if validation is None else min(iteration, validation)
            kept = [
                line
                for line in read_metrics(self.path)
                if line["iteration"] <= (last if "score" in line else iteration)
            ]
            write_bytes(self.metrics, b"".join(map(as_line, kept)))
