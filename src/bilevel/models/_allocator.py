"""Memory that is freed stays with the process, so that the next step does not have to ask for it again."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache

# malloc.h's names.
TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8
# What may stay; the second is the largest that older versions of glibc accept.
SIZES = 1 << 30, 32 << 20


@lru_cache(None)
def keep_freed_memory() -> bool:
    """Tell glibc not to return freed memory to the system; whether it was told so.

    Activations are megabytes that live for milliseconds. By default malloc gives them back and fetches them again, page
    by page, each time, which costs most where page faults are expensive, as in a virtual machine.
    Other allocators and systems are left alone, and so are settings that the user made (`MALLOC_TRIM_THRESHOLD_`,
    `GLIBC_TUNABLES`).
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018 - elsewhere mallopt may mean other things
        mallopt = libc.mallopt
    except (OSError, AttributeError, TypeError):
        return False
    # Other threads' arenas are cut into heaps that are returned whenever they are empty; let all use the first.
    mallopt(ARENA_MAX, 1)
    return any(mallopt(MMAP_THRESHOLD, size) and mallopt(TRIM_THRESHOLD, size) for size in SIZES)
