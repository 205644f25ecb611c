"""The memory that a call needs, measured in a process that has run other code before."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path


def peak_memory(call: Callable[[], object]) -> int | None:
    """The peak of the resident memory during `call` above what is resident before it, in bytes.

    The call runs twice, and the second run is measured, so that caches and imports do not count. The result is None if
    it cannot be measured: this needs Linux's /proc, and a C library that returns freed memory.
    """
    call()
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # otherwise the call would reuse freed memory, and show no growth
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the kernel's peak to the present value
    except (OSError, AttributeError):
        return None
    call()
    return max(0, _resident("VmHWM") - before)


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
