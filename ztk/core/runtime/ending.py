"""Background threads end before the interpreter does.

A daemon thread that comes back from C++ after the interpreter has begun to end is unwound through frames that forbid it, and the process
aborts ("terminate called without an active exception"). So every thread of ztk that runs torch's code is listed here, and the main
thread, when it has run to its end or raised, ends them one after another, the newest first: older ones may work for newer ones.
"""

import sys
import threading
from collections.abc import Callable

_threads: dict[threading.Thread, Callable[[], None]] = {}


def end_with_process(thread: threading.Thread, *, end: Callable[[], None]) -> None:
    """`end()` is called before the interpreter ends if `thread` still runs; it returns when the thread has ended or may be left alone.

    thread: calls `forget` as the last thing it does. end: is kept until then, so it holds no more than it needs.
    """
    _threads[thread] = end


def forget(thread: threading.Thread) -> None:
    """It has nothing more to run."""
    _threads.pop(thread, None)


def seconds_to_end() -> float:
    """How long to wait at the end for what may wait for another rank: after an error that rank is unlikely to come."""
    return 0.2 if hasattr(sys, "last_value") else 2.0


def _end_all() -> None:
    for thread, end in reversed(list(_threads.items())):
        if thread.is_alive():
            end()


# Before `atexit`'s functions and before threads that are no daemons are waited for, as concurrent.futures does.
# pyrefly: ignore[missing-attribute]  # CPython's, used by concurrent.futures
threading._register_atexit(_end_all)
