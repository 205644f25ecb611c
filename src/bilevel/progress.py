"""Progress of long work on standard error: progress bars, on a terminal only by default, and status lines."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bilevel import extras

# Seconds until the first line about long work, and between lines.
FIRST, NEXT = 2.0, 10.0
_active = threading.Lock()


@contextmanager
def bar(
    title: str, total: int | None, detail: str = "", done: int = 0, show: bool | None = True, **start: str
) -> Iterator[Callable[..., None]]:
    """A bar on standard error; `advance(done, **fields)` moves it, with `fields` filling in `detail`.

    Without a total it shows how much was done. `show=None` shows the bar on a terminal only. Without the package rich
    (extra `cli`) there is no bar.
    """
    if not (sys.stderr.isatty() if show is None else show) or not extras.installed("rich"):
        yield lambda done, **fields: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    columns += [TextColumn(detail)] if detail else []
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        fields: dict[str, Any] = {"value": "…", **start}
        task = progress.add_task(title, total=total, completed=done, **fields)
        yield lambda done, **fields: progress.update(task, completed=done, **fields)


@contextmanager
def counter(title: str, total: int, show: bool | None) -> Iterator[Callable[[str], None]]:
    """A bar that advances by one at each call, which names the current work. By default only a terminal shows it."""
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda doing: None
        return
    done = -1
    with bar(title, total, "{task.fields[value]}") as advance:

        def begin(doing: str) -> None:
            nonlocal done
            done += 1
            advance(done, value=doing)

        yield begin
        advance(total, value="done")


@contextmanager
def heartbeat(quiet: bool = False, first: float = FIRST, between: float = NEXT) -> Iterator[Callable[[str], None]]:
    """A status line for long work: on a terminal it is overwritten, in a pipe or log file every status is a new line.

    Yields a function that sets the status. Nothing is written before `first` seconds have passed. A thread writes the
    line, so that it also appears during a single long call. Inside another heartbeat this one writes nothing.
    """
    if quiet or not _active.acquire(blocking=False):
        yield lambda text: None
        return
    began, status, stopped = time.monotonic(), ["starting"], threading.Event()
    terminal = sys.stderr.isatty()

    def write_status() -> None:
        wait = first
        while not stopped.wait(wait):
            line = f"{time.monotonic() - began:.0f} s, {status[0]}"
            sys.stderr.write(f"\r\x1b[2K{line}" if terminal else f"{line}\n")
            sys.stderr.flush()
            wait = 0.5 if terminal else between

    thread = threading.Thread(target=write_status, daemon=True)
    thread.start()
    try:
        yield lambda text: status.__setitem__(0, text)
    finally:
        stopped.set()
        thread.join()
        if terminal and time.monotonic() - began > first:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
        _active.release()
