"""Standard output and standard error that outlive their reader, such as `head` behind a pipe."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TextIO


class LastingOutput:
    """A text stream that drops its text once the reader of its pipe has ended, where the stream itself would raise BrokenPipeError."""

    def __init__(self, stream: TextIO, *, on_closed: Callable[[], None] = lambda: None) -> None:
        """on_closed: called once, when the reader has ended."""
        self._stream, self._on_closed = stream, on_closed

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._drop()

    def _drop(self) -> None:
        """The text that is still in the buffer, and all that follows, goes to the null device."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)
        self._on_closed()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)  # isatty, fileno, encoding ...


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Context in which printing to a closed pipe raises no error."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(LastingOutput, before)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before
