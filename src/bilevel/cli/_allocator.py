"""A setting for the process of the command: malloc keeps freed memory instead of returning it to the system."""

from __future__ import annotations

import ctypes
import os

# Parameters of mallopt, with their names in malloc.h.
TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8
# The bytes that malloc may keep, in the order in which they are tried. Old versions of glibc refuse the first.
SIZES = 1 << 30, 32 << 20


def keep_freed_memory() -> bool:
    """Tell glibc not to return freed memory to the system; return whether it accepted.

    Activations take megabytes for milliseconds. By default malloc returns this memory to the system and requests it
    again, page by page, which is slow if page faults are expensive, as in a virtual machine. Nothing is changed with
    other C libraries, or if the user has set `MALLOC_…` or `GLIBC_TUNABLES`. The setting affects the whole process, so
    only the command calls this function, and never the library.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018 - other C libraries may have another mallopt
        mallopt = libc.mallopt
    except (OSError, AttributeError, TypeError):
        return False
    # One arena for all threads, because further arenas return empty heaps to the system.
    mallopt(ARENA_MAX, 1)
    return any(mallopt(MMAP_THRESHOLD, size) and mallopt(TRIM_THRESHOLD, size) for size in SIZES)
