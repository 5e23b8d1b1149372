"""How this process keeps freed memory when it computes on the CPU."""

import ctypes
import functools
import os

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_TRIM_THRESHOLD = 2**31 - 1
_LARGEST_MMAP_THRESHOLD = 4 << 20 << 3  # bytes, HEAP_MAX_SIZE / 2 on 64 bits; glibc refuses more
_USERS_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@functools.cache
def keep_freed_memory() -> None:
    """Keeps freed memory in the process for the next tensor instead of returning it to the system.

    A training step frees its activations in the backward and allocates as many in the next forward. glibc returns the top of its heap when
    about twice the largest block ever freed lies there unused: 6 MB for a model of 30M parameters. Each page that is allocated again
    costs a page fault and 4 KiB of zeros: 9 to 25 thousand per step of that model, 45 of 1150 ms. The peak of resident memory does not
    change. Blocks above 32 MB are still returned. Settings in the user's environment are respected. Without `mallopt` in the C library
    nothing happens: only speed depends on it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in _USERS_OWN):
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    mallopt(_M_TRIM_THRESHOLD, _LARGEST_TRIM_THRESHOLD)


def return_freed_memory() -> None:
    """Returns to the system what was freed until now: an engine has taken a model's weights into buffers of its own, and the memory they were
    in, 4 bytes per parameter, is of no use to the steps. Without `malloc_trim` in the C library nothing happens."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
