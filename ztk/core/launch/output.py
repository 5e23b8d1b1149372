"""Standard output and standard error that end no run: a reader that has ended, a terminal that is gone, a full disk, a closed descriptor."""

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

_PASSING = {errno.ENOSPC, errno.EDQUOT, errno.EAGAIN}  # a later write may succeed


class LastingOutput:
    """A text stream whose errors end nothing.

    Text that a full disk does not take is lost, and later text is written again when there is room. After every other error, all text is
    dropped.
    """

    def __init__(self, stream: TextIO, *, on_lost: Callable[[str], None] = lambda reason: None) -> None:
        """on_lost: called once, with the reason for which text is lost."""
        self._stream, self._on_lost = stream, on_lost
        self._is_lost = False
        self.lost = ""  # the reason for which a reader misses text; "" if the reader has ended

    def write(self, text: str) -> int:
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def isatty(self) -> bool:
        """Whether the stream is a terminal; False for one that is closed."""
        try:
            return self._stream.isatty()
        except (OSError, ValueError):
            return False

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            if error.errno not in _PASSING:
                self._drop()
            self._tell(error)
        except ValueError as error:  # the stream is closed
            self._tell(error)

    def _drop(self) -> None:
        """The text that is still in the buffer, and all that follows, goes to the null device."""
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)

    def _tell(self, error: OSError | ValueError) -> None:
        reason = getattr(error, "strerror", None) or str(error)
        if getattr(error, "errno", None) != errno.EPIPE:
            self.lost = self.lost or reason
        if not self._is_lost:
            self._is_lost = True
            self._on_lost(reason)

    def end(self) -> None:
        """Flushes. Text that is still in the buffer is dropped, because the interpreter would fail over it when it exits."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._tell(error)
            self._drop()
            with contextlib.suppress(OSError, ValueError):
                self._stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)  # fileno, encoding ...


def open_closed_streams() -> None:
    """Opens the null device for standard streams that were closed (`>&-`).

    Otherwise the next files would get their numbers, and children would print into them.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))


def is_lost(output: LastingOutput) -> bool:
    """Ends the output of a command whose only result is its text. Returns whether a part is lost, and writes the reason to standard error."""
    output.end()
    if output.lost:
        sys.stderr.write(f"ztk: standard output is not complete: {output.lost}\n")
    return bool(output.lost)


@contextlib.contextmanager
def lasting_output() -> Iterator[LastingOutput]:
    """Context in which printing raises no error. Yields standard output."""
    open_closed_streams()
    before = sys.stdout, sys.stderr
    lasting = tuple(map(LastingOutput, before))
    sys.stdout, sys.stderr = lasting
    try:
        yield lasting[0]
    finally:
        for stream in lasting:
            stream.end()
        sys.stdout, sys.stderr = before
