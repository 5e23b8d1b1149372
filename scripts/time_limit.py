"""A time limit for measurements, also for code that does not return to Python."""

import contextlib
import faulthandler
import signal
from collections.abc import Iterator

GRACE_SECONDS = 45.0  # after the deadline, a process that hangs in a kernel or a compiler is killed


class OutOfTime(RuntimeError):
    """A measurement exceeds its time limit."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises OutOfTime in the block after `seconds`. If a kernel or a compiler does not return to Python, the process ends GRACE_SECONDS later
    and prints its stack."""

    def end(signum: int, frame: object) -> None:
        raise OutOfTime("the deadline has passed")

    before = signal.signal(signal.SIGALRM, end)
    faulthandler.dump_traceback_later(seconds + GRACE_SECONDS, exit=True)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # repeats in case a finalizer swallows the first
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)
