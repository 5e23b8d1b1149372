"""Ends background threads before the interpreter ends, and waits for gloo's.

A daemon thread that returns from C++ after the interpreter has begun to end is unwound through frames that forbid it, and the process
aborts ("terminate called without an active exception"). Every thread of ztk that runs torch's code is therefore registered here. When the
main thread has finished or raised, it ends them one after another, the newest first: older threads may still serve newer ones.

[Note: Gloo's threads at exit]
gloo computes a collective on a thread of its own, which first notifies the caller and then frees the collective's tensors. If the caller
has freed its tensor by then, the thread waits for the interpreter's lock to free the Python object, and aborts as above if the interpreter
has begun to end. So a script whose last line is `dist.all_reduce` was aborted where the operating system let gloo's thread wait in between.
torch has no function that waits for it, and destroying a group does not end its threads while a script refers to the group. So the process
waits until the operating system reports that these threads sleep. A thread that waits for another rank sleeps too and is left alone.
"""

import atexit
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

_GLOO_THREAD = "pt_gloo_runloop"  # torch's name for the threads that compute gloo's collectives
_LONGEST_SECONDS = 60.0  # a thread that computes ends long before
_TASKS = Path("/proc/self/task")
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


def gloo_threads() -> list[Path]:
    """The folders in /proc of gloo's threads. Empty on systems without /proc."""
    return [task for task in _TASKS.glob("*") if _read(task / "comm").strip() == _GLOO_THREAD]


@atexit.register  # after the functions that a script has registered, which may call collectives
def _wait_for_gloo() -> None:
    """Returns when gloo's threads sleep. See [Note: Gloo's threads at exit]."""
    threads, deadline, times = gloo_threads(), time.monotonic() + _LONGEST_SECONDS, 0
    while (
        threads and times < 2 and time.monotonic() < deadline
    ):  # twice: a thread may sleep for a moment at a lock of another
        time.sleep(0.001)  # without the interpreter's lock
        times = times + 1 if all(map(_sleeps, threads)) else 0


def join_busy(thread: threading.Thread) -> None:
    """Joins `thread`, but leaves it alone once it has slept for `seconds_to_end()`: it may wait for another rank. The time in which it only
    waits for a processor does not count."""
    left, task = seconds_to_end(), _TASKS / str(thread.native_id)
    while thread.is_alive() and left > 0:
        start = time.monotonic()
        thread.join(0.01)
        left -= time.monotonic() - start if _sleeps(task) else 0.0


def _sleeps(task: Path) -> bool:
    """Whether the thread waits for a condition or a message, or is gone. True on systems without /proc."""
    return _read(task / "stat").rpartition(")")[2].split()[:1] in ([], ["S"])


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the thread has ended
        return ""


# Runs before `atexit` functions and before non-daemon threads are joined, as in concurrent.futures.
# pyrefly: ignore[missing-attribute]  # CPython's, used by concurrent.futures
threading._register_atexit(_end_all)
