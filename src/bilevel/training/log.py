"""The log of a run: `metrics.jsonl`, with its only reader, and TensorBoard events."""

from __future__ import annotations

import json
import os
import socket
import time
import warnings
import zlib
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bilevel.errors import BilevelError, BilevelWarning
from bilevel.files import not_written

if TYPE_CHECKING:
    from bilevel.training.folder import RunFolder

METRICS = "metrics.jsonl"
# The checksum in a line of the log; lines of version 0.1 have none.
CRC = "crc"


def read_metrics(folder: Path, report: Callable[[str], None] | None = None) -> list[dict[str, float]]:
    """The records in a run's `metrics.jsonl`; none where there is no such file.

    A last line that a crash cut short, or that is just being written, is left out. Any other line that is not a record
    is left out and named in one sentence, because weights and checkpoints do not depend on it.

    Args:
        folder: the folder of the run.
        report: called with the sentence; by default it is a BilevelWarning.
    """
    file = folder / METRICS
    try:
        lines = file.read_bytes().split(b"\n") if file.is_file() else []
    except OSError as error:
        raise BilevelError(f"{file} cannot be read: {error.strerror or error}.") from error
    found = [_record(line) for line in lines]
    # A file has checksums in all of its lines or, from version 0.1, in none.
    if any(CRC in record for record in found if record is not None):
        found = [record if record is not None and CRC in record else None for record in found]
    wrong = [str(number) for number, record in enumerate(found[:-1], 1) if record is None]
    if wrong:
        count = len(lines) - (not lines[-1])
        more = f" and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        sentence = (
            f"{file}: left out line {', '.join(wrong[:10])}{more} of {count}, which is damaged or not a "
            "record of numbers with an iteration."
        )
        (report or _warn)(sentence)
    return [{name: x for name, x in record.items() if name != CRC} for record in found if record is not None]


def _record(line: bytes) -> dict[str, float] | None:
    """The numbers of one line, or None if the line is damaged."""
    try:
        record = json.loads(line)
        rest = {name: x for name, x in record.items() if name != CRC}
        intact = record.get(CRC) in (None, _crc(rest))
        numbers = {name: float(x) for name, x in record.items() if type(x) in (int, float)}
        whole = intact and len(numbers) == len(record) and type(record["iteration"]) is int
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError):
        return None
    return record if whole else None


def as_line(record: Mapping[str, float]) -> bytes:
    """One line of the log, with a checksum of the rest of it."""
    return (json.dumps({**record, CRC: _crc(record)}) + "\n").encode()


def _crc(record: Mapping[str, float]) -> int:
    return zlib.crc32(json.dumps(record).encode())


def _warn(sentence: str) -> None:
    warnings.warn(sentence, BilevelWarning, stacklevel=3)


class Log:
    """Appends one line of JSON per record, and the same as TensorBoard events where that is installed.

    Args:
        folder: the folder of the run.
        iteration: the hyperiteration after which the run is resumed, or None for a new run; later records are dropped.
        validation: the hyperiteration of its last validation; records of later ones are dropped.
    """

    def __init__(self, folder: RunFolder, iteration: int | None, validation: int | None = None) -> None:
        folder.forget_after(-1 if iteration is None else iteration, validation)
        self.path = folder.metrics
        try:
            # Unbuffered, so that a full disk is an error at the first line that does not fit.
            self.file = folder.metrics.open("ab", buffering=0)
            self.events = _events(folder.events, iteration)
        except OSError as error:
            raise not_written(self.path, error) from error

    def write(self, iteration: int, numbers: Mapping[str, float]) -> None:
        try:
            self.file.write(as_line({"iteration": iteration, **numbers}))
            if self.events is not None:
                self.events.write(iteration, numbers)
        except OSError as error:
            raise not_written(self.path, error) from error

    def close(self) -> None:
        self.file.close()
        if self.events is not None:
            self.events.file.close()


class Events:
    """A file of TensorBoard events. TensorBoard's own writer runs in a thread, where errors cannot be caught."""

    def __init__(self, folder: Path, iteration: int | None) -> None:
        self.event: Any = import_module("tensorboard.compat.proto.event_pb2")
        self.summary: Any = import_module("tensorboard.compat.proto.summary_pb2")
        writer: Any = import_module("tensorboard.summary.writer.record_writer")
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self.file = (folder / name).open("wb", buffering=0)
        self.records = writer.RecordWriter(self.file)
        self._add(file_version="brain.Event:2")
        if iteration is not None:  # TensorBoard drops what was logged after the checkpoint
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
