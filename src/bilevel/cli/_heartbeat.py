"""A line on standard error about long work: on a terminal in place, in a pipe or log file as lines of its own."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FIRST, NEXT = 2.0, 10.0  # seconds until the first line, and between lines


@contextmanager
def heartbeat(quiet: bool = False, first: float = FIRST, between: float = NEXT) -> Iterator[Callable[[str], None]]:
    """Yield a function that is told what is being done. Nothing is written before `first` seconds have passed.

    A thread writes the line, so that one call that lasts long does not leave the user without a word.
    """
    if quiet:
        yield lambda what: None
        return
    began, said, stopped = time.monotonic(), ["starting"], threading.Event()
    terminal = sys.stderr.isatty()

    def speak() -> None:
        wait = first
        while not stopped.wait(wait):
            line = f"{time.monotonic() - began:.0f} s, {said[0]}"
            sys.stderr.write(f"\r\x1b[2K{line}" if terminal else f"{line}\n")
            sys.stderr.flush()
            wait = 0.5 if terminal else between

    thread = threading.Thread(target=speak, daemon=True)
    thread.start()
    try:
        yield lambda what: said.__setitem__(0, what)
    finally:
        stopped.set()
        thread.join()
        if terminal:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
