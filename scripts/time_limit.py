"""An end to what a script measures, also where it does not return to Python."""

import contextlib
import faulthandler
import signal
from collections.abc import Iterator

GRACE_SECONDS = 45.0  # behind the deadline, after which a process that hangs in a kernel or a compiler is ended


class OutOfTime(RuntimeError):
    """A measurement that would take too long."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises OutOfTime inside when they are over, in a gate or a compiler, too. What does not return to Python then ends with the process,
    GRACE_SECONDS later, which says where it was."""

    def end(signum: int, frame: object) -> None:
        raise OutOfTime("the deadline has passed")

    before = signal.signal(signal.SIGALRM, end)
    faulthandler.dump_traceback_later(seconds + GRACE_SECONDS, exit=True)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again, where a finalizer has swallowed the first
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)
