"""How much memory a call needs, as the operating system sees it. For probes: each figure wants a fresh process."""

from __future__ import annotations

import gc
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")


def growth(warm_up: Callable[[], object], run: Callable[[], Result]) -> tuple[int, float, Result]:
    """The peak of the resident memory during `run` above what is resident after `warm_up`, in bytes; the
    processor's seconds for `run`, and its result.

    The warm-up should do everything that `run` does, in small, so that the interpreter, torch, the data and a single
    step's workspace do not count.
    """
    warm_up()
    gc.collect()
    before = _resident("VmRSS")
    _forget_peak()
    began = time.process_time()
    result = run()
    seconds = time.process_time() - began
    return max(_resident("VmHWM") - before, 0), seconds, result


def _resident(field: str) -> int:
    """VmRSS (now) or VmHWM (its peak) in bytes; where there is no /proc, the peak since the process began for both."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _forget_peak() -> None:
    """Let the kernel's peak start again from the present, so that importing torch is not in it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        print("the peak includes what was resident before the run", file=sys.stderr)
