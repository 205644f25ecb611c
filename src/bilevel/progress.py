"""Progress bars on standard error. By default they are shown on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bilevel import extras


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
    """A bar that moves by one at each call, with a word on what is being done. By default only a terminal shows it."""
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
