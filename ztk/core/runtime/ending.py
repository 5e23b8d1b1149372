"""Ends background threads before the interpreter ends.

A daemon thread that returns from C++ after the interpreter has begun to end is unwound through frames that forbid it, and the process
aborts ("terminate called without an active exception"). Every thread of ztk that runs torch's code is therefore registered here. When the
main thread has finished or raised, it ends them one after another, the newest first: older threads may still serve newer ones.
"""

import sys
import threading
from collections.abc import Callable

_threads: dict[threading.Thread, Callable[[], None]] = {}


def end_with_process(thread: threading.Thread, *, end: Callable[[], None]) -> None:
    """Registers `end()`, which is called before the interpreter ends if `thread` still runs. It returns when the thread may be left alone.

    thread: must call `forget` as its last action. end: kept until then, so it should hold few references.
    """
    _threads[thread] = end


def forget(thread: threading.Thread) -> None:
    """Unregisters a thread that has finished."""
    _threads.pop(thread, None)


def seconds_to_end() -> float:
    """Seconds to wait at exit for a call that may wait for another rank. Short after an error: that rank is then unlikely to answer."""
    return 0.2 if hasattr(sys, "last_value") else 2.0


def _end_all() -> None:
    for thread, end in reversed(list(_threads.items())):
        if thread.is_alive():
            end()


# Runs before `atexit` functions and before non-daemon threads are joined, as in concurrent.futures.
# pyrefly: ignore[missing-attribute]  # CPython's, used by concurrent.futures
threading._register_atexit(_end_all)
