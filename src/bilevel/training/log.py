"""Where a run's numbers go: `metrics.jsonl`, and TensorBoard."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

from bilevel.training.files import not_written
from bilevel.training.folder import RunFolder


class Log:
    """Appends one line of JSON per record, and the same as TensorBoard events where that is installed.

    Args:
        folder: where.
        iteration: the hyperiteration after which the run goes on, or None when it begins; later records are dropped.
    """

    def __init__(self, folder: RunFolder, iteration: int | None) -> None:
        folder.forget_after(-1 if iteration is None else iteration)
        self.path = folder.metrics
        try:
            # Unbuffered, so that a full disk is noticed by the line that meets it.
            self.file = folder.metrics.open("ab", buffering=0)
            self.events = _events(folder.events, iteration)
        except OSError as error:
            raise not_written(self.path, error) from error

    def write(self, iteration: int, numbers: Mapping[str, float]) -> None:
        try:
            self.file.write((json.dumps({"iteration": iteration, **numbers}) + "\n").encode())
            if self.events is not None:
                self.events.write(iteration, numbers)
        except OSError as error:
            raise not_written(self.path, error) from error

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file.close()
        if self.events is not None:
            self.events.file.close()


class Events:
    """One of TensorBoard's files. Its own writer has a thread, in which an error ends as a traceback."""

    def __init__(self, folder: Path, iteration: int | None) -> None:
        self.event: Any = import_module("tensorboard.compat.proto.event_pb2")
        self.summary: Any = import_module("tensorboard.compat.proto.summary_pb2")
        writer: Any = import_module("tensorboard.summary.writer.record_writer")
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self.file = (folder / name).open("wb", buffering=0)
        self.records = writer.RecordWriter(self.file)
        self._add(file_version="brain.Event:2")
        if iteration is not None:  # what was logged after the checkpoint is run again, and replaced
            start = self.event.SessionLog(status=self.event.SessionLog.START)
            self._add(step=iteration + 1, session_log=start)

    def write(self, iteration: int, numbers: Mapping[str, float]) -> None:
        values = [self.summary.Summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
        self._add(step=iteration, summary=self.summary.Summary(value=values))

    def _add(self, **content: Any) -> None:
        self.records.write(self.event.Event(wall_time=time.time(), **content).SerializeToString())


def _events(folder: Path, iteration: int | None) -> Events | None:
    try:
        return Events(folder, iteration)
    except ImportError:
        return None
