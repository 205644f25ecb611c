"""How much resident memory a call needs. Call this in a fresh process for every figure (`harness.probe`)."""

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
    """The growth of the resident memory during `run` in bytes, the processor time of `run` in seconds, and its result.

    The growth is the peak during `run` minus what is resident after `warm_up`. The warm-up should do everything that
    `run` does, on a smaller scale. Then the interpreter, torch, the data and the workspace of a single step are not
    counted.
    """
    warm_up()
    gc.collect()
    before = _resident("VmRSS")
    _reset_peak()
    began = time.process_time()
    result = run()
    seconds = time.process_time() - began
    return max(_resident("VmHWM") - before, 0), seconds, result


def _resident(field: str) -> int:
    """VmRSS (now) or VmHWM (its peak) in bytes. Without /proc, both are the peak since the process began."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _reset_peak() -> None:
    """Reset the kernel's peak to the present value, so that the import of torch is not included."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        print("the peak includes what was resident before the run", file=sys.stderr)
