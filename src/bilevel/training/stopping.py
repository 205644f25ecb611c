"""Ending a run before its last hyperiteration: early stopping, signals, and a time budget."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

# Under torchrun a Ctrl-C reaches a process twice, from the terminal and from torchrun. A signal later than this is new.
ECHO_SECONDS = 3.0
# The processes of a run start, and so end their time budgets, within this time of each other.
START_SECONDS = 60.0
# The exit code of a run whose time budget is used up: "try again later" in the BSD convention (EX_TEMPFAIL).
TIME_USED = 75
NAMES = {"SIGINT": "Ctrl-C", "SIGTERM": "SIGTERM", "SIGHUP": "SIGHUP (a closed terminal)"}


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
        self.best = -math.inf if state["best"] is None else float(state["best"])
        self.best_iteration, self.waited = int(state["best_iteration"]), int(state["waited"])


class Interrupted(Exception):
    """A hyperiteration or a validation was not finished, because the run was asked to stop. Nothing has changed."""


@dataclass
class StopRequest:
    """Whether this process is to save and stop: it received a signal, or its time is used up.

    Args:
        signal: the signal that was received first.
        when: the time of that signal.
        deadline: the end of the time budget, on the clock of `time.monotonic`.
    """

    signal: signal.Signals | None = None
    when: float = 0.0
    deadline: float = math.inf

    def __bool__(self) -> bool:
        return self.signal is not None or time.monotonic() >= self.deadline

    @property
    def _late(self) -> bool:
        """Whether a stop without a signal to this process is the end of the time budget, here or in another process."""
        return time.monotonic() >= self.deadline - START_SECONDS

    @property
    def name(self) -> str:
        if self.signal is not None:
            return NAMES[self.signal.name]
        return "its time budget" if self._late else "a signal to another process"

    @property
    def exit_code(self) -> int:
        """The shell's convention for a process ended by a signal; `TIME_USED` for the end of the time budget."""
        return TIME_USED if self.signal is None and self._late else 128 + int(self.signal or signal.SIGTERM)


@contextmanager
def stop_requests(deadline: float = math.inf) -> Iterator[StopRequest]:
    """Ctrl-C, SIGTERM and SIGHUP become a request to save and stop; a second one raises `KeyboardInterrupt` at once.

    A signal that is ignored stays ignored: `nohup` does this with SIGHUP.
    """
    request = StopRequest(deadline=deadline)
    if threading.current_thread() is not threading.main_thread():
        yield request  # only the main thread may install handlers
        return
    terminals = [output for output in (1, 2) if os.isatty(output)]

    def note(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        _redirect_closed(terminals)
        if request.signal is None:
            request.signal, request.when = signal.Signals(number), now
        elif now - request.when > ECHO_SECONDS:
            raise KeyboardInterrupt

    numbers = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]  # Windows has no SIGHUP
    numbers = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _redirect_closed(terminals: list[int]) -> None:
    """Redirect the output of closed terminals to the null device, because writing to them is an error."""
    for output in terminals:
        if not os.isatty(output):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, output)
            os.close(null)
