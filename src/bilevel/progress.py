"""Progress bars, shown where somebody is looking."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def outer_progress(total: int, show: bool | None) -> Iterator[Callable[[int, float], None]]:
    """A bar over hyperiterations with the outer value and the time left; `report(done, value)` moves it."""
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda done, value: None
        return
    with bar("hyperiterations", total, "f_T(λ) {task.fields[value]}") as advance:
        yield lambda done, value: advance(done, value=f"{value:.6g}")


@contextmanager
def bar(title: str, total: int | None, detail: str = "", done: int = 0, **start: str) -> Iterator[Callable[..., None]]:
    """A bar on standard error; `advance(done, **fields)` moves it, with `fields` filling in `detail`.

    Without a total it shows that something is going on, and how much of it was done.
    """
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
