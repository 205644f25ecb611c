"""Progress of long work on standard error: bars on a terminal, and a line now and then in a pipe or log file."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from bilevel import extras

# Seconds until the first line about long work, and between lines: of a heartbeat, and in the place of a bar.
FIRST, NEXT = 2.0, 10.0
BAR_FIRST, BAR_NEXT = 30.0, 60.0
_active = threading.Lock()


@contextmanager
def bar(
    title: str, total: int | None, detail: str = "", done: int = 0, show: bool | None = True, **start: str
) -> Iterator[Callable[..., None]]:
    """A bar on standard error; `advance(done, **fields)` moves it, with `fields` filling in `detail`.

    Without a total it shows how much was done. By default a pipe or log file gets a line after half a minute and then
    every minute. `show=True` draws the bar there too, and `show=False` writes nothing. Without the package rich (extra
    `cli`) a terminal gets lines.
    """
    if show is False:
        yield lambda done, **fields: None
        return
    fields: dict[str, Any] = {"value": "…", **start}
    if not extras.installed("rich") or (show is None and not sys.stderr.isatty()):
        yield _lines(title, total, detail, done, fields)
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
        task = progress.add_task(title, total=total, completed=done, **fields)
        yield lambda done, **fields: progress.update(task, completed=done, **fields)


def _lines(title: str, total: int | None, detail: str, start: int, fields: dict[str, Any]) -> Callable[..., None]:
    """A function like a bar's `advance` that writes a line if the last one is long ago."""
    began = time.monotonic()
    due = began + BAR_FIRST

    def advance(done: int, **changes: Any) -> None:
        nonlocal due
        whole = changes.pop("total", total)
        fields.update(changes)
        seconds = time.monotonic() - began
        if began + seconds < due:
            return
        due = began + seconds + BAR_NEXT
        parts = [f"{title}: {done:,} of {whole:,}" if whole else f"{title}: {done:,}", f"{seconds / 60:.1f} min"]
        if whole and done > start:
            parts.append(f"about {seconds / 60 * (whole - done) / (done - start):.1f} min left")
        if detail:
            parts.append(detail.format(task=SimpleNamespace(fields=fields)))
        sys.stderr.write(", ".join(parts) + "\n")
        sys.stderr.flush()

    return advance


@contextmanager
def counter(title: str, total: int, show: bool | None) -> Iterator[Callable[[str], None]]:
    """A `bar` that advances by one at each call, which names the current work."""
    done = -1
    with bar(title, total, "{task.fields[value]}", show=show) as advance:

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
