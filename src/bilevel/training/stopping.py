"""When a run ends before its last hyperiteration: it stopped getting better, or somebody asked."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any


@dataclass
class EarlyStopping:
    """Stop after `patience` validations without a new best score; 0 never stops."""

    patience: int = 0
    best: float = -math.inf
    best_iteration: int = 0
    waited: int = 0

    def update(self, iteration: int, score: float) -> bool:
        """Whether this score is the best so far."""
        if score > self.best:
            self.best, self.best_iteration, self.waited = score, iteration, 0
            return True
        self.waited += 1
        return False

    @property
    def stop(self) -> bool:
        return 0 < self.patience <= self.waited

    def state(self) -> dict[str, Any]:
        best = self.best if math.isfinite(self.best) else None
        return {"best": best, "best_iteration": self.best_iteration, "waited": self.waited}

    def restore(self, state: dict[str, Any]) -> None:
        self.best = -math.inf if state["best"] is None else state["best"]
        self.best_iteration, self.waited = state["best_iteration"], state["waited"]


@dataclass
class StopRequest:
    """Whether Ctrl-C or SIGTERM came, and which."""

    signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def name(self) -> str:
        return {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}[self.signal or signal.SIGINT]

    @property
    def exit_code(self) -> int:
        """The shell's convention for a process ended by a signal."""
        return 128 + int(self.signal or signal.SIGINT)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Ctrl-C and SIGTERM become a request that the loop answers between two hyperiterations; a second one is at once."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # only the main thread may install handlers
        return

    def note(number: int, frame: FrameType | None) -> None:
        if request:
            raise KeyboardInterrupt
        request.signal = signal.Signals(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
