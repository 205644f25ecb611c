"""When a run ends before its last hyperiteration: it stopped getting better, or somebody asked."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

# A Ctrl-C reaches a process twice under torchrun, from the terminal and passed on; later than this it is a second one.
ECHO_SECONDS = 3.0


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


class Interrupted(Exception):
    """Something long was left unfinished, because a stop was asked for."""


@dataclass
class StopRequest:
    """Whether Ctrl-C or SIGTERM came to this process, which, and when."""

    signal: signal.Signals | None = None
    when: float = 0.0

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def name(self) -> str:
        names = {None: "a signal to another process", signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
        return names[self.signal]

    @property
    def exit_code(self) -> int:
        """The shell's convention for a process ended by a signal."""
        return 128 + int(self.signal or signal.SIGTERM)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Ctrl-C and SIGTERM become a request that the loop answers when it can save; a second one ends it at once."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # only the main thread may install handlers
        return

    def note(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not request:
            request.signal, request.when = signal.Signals(number), now
        elif now - request.when > ECHO_SECONDS:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
