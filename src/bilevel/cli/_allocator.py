"""A setting of the command's own process: malloc keeps freed memory for the next step."""

from __future__ import annotations

import ctypes
import os

# The names are those of malloc.h.
TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8
# Bytes that malloc may keep. Older versions of glibc accept at most the second number.
SIZES = 1 << 30, 32 << 20


def keep_freed_memory() -> bool:
    """Tell glibc not to return freed memory to the system; return whether it accepted.

    Activations are megabytes that live for milliseconds. By default malloc returns them to the system and fetches them
    again, page by page, which is slow where page faults are expensive, as in a virtual machine. Nothing is changed on
    other systems, or if the user has set `MALLOC_…` or `GLIBC_TUNABLES`. The setting holds for the whole process, so
    the library never calls this function.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018 - other C libraries may have another mallopt
        mallopt = libc.mallopt
    except (OSError, AttributeError, TypeError):
        return False
    # All threads share one arena: those of other threads return empty heaps to the system.
    mallopt(ARENA_MAX, 1)
    return any(mallopt(MMAP_THRESHOLD, size) and mallopt(TRIM_THRESHOLD, size) for size in SIZES)
