"""Where a run's numbers go: `metrics.jsonl`, TensorBoard, and the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from bilevel.errors import BilevelError
from bilevel.training.folder import RunFolder


class Log:
    """Appends one line of JSON per record, and the same as TensorBoard events where that is installed."""

    def __init__(self, folder: RunFolder, iteration: int) -> None:
        folder.forget_after(iteration)
        self.path = folder.metrics
        self.file = folder.metrics.open("a", encoding="utf-8")
        self.events: Any = _events(folder, iteration)

    def write(self, iteration: int, numbers: Mapping[str, float]) -> None:
        try:
            self.file.write(json.dumps({"iteration": iteration, **numbers}) + "\n")
            self.file.flush()
        except OSError as error:
            raise BilevelError(f"{self.path} could not be written: {error.strerror or error}.") from error
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
            self.events.close()


def _events(folder: RunFolder, iteration: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    # What was logged after the checkpoint is run again, and replaced.
    return SummaryWriter(str(folder.events), purge_step=iteration + 1 if iteration else None)  # type: ignore[no-untyped-call]
