"""Where a run's numbers go: `metrics.jsonl`, and TensorBoard."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
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
        except OSError as error:
            raise not_written(self.path, error) from error
        self.events: Any = _events(folder, iteration)

    def write(self, iteration: int, numbers: Mapping[str, float]) -> None:
        try:
            self.file.write((json.dumps({"iteration": iteration, **numbers}) + "\n").encode())
        except OSError as error:
            raise not_written(self.path, error) from error
        if self.events is not None:
            for name, number in numbers.items():
                self.events.add_scalar(name, number, iteration)

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file.close()
        if self.events is not None:
            with contextlib.suppress(OSError):  # a picture of what is in metrics.jsonl
                self.events.close()


def _events(folder: RunFolder, iteration: int | None) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    # What was logged after the checkpoint is run again, and replaced.
    return SummaryWriter(str(folder.events), purge_step=None if iteration is None else iteration + 1)
