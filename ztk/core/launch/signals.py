"""The signals that end a command, noted so that none is lost.

Python ignores an exception that is raised in the callback of a weak reference, and the import system has such callbacks. A library may
also replace an exception by an error of its own cleanup. So the handler notes the signal before it raises, and the command calls
`raise_noted` before it starts ranks and when an error has ended it.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from ztk.core.policies.ending import ENDING

_noted: list[int] = []  # of this process, as handlers are


@contextmanager
def noted_signals() -> Iterator[None]:
    """Context in which SIGINT raises KeyboardInterrupt, the others of `ENDING` raise SystemExit(128 + signal), and all are noted."""
    _noted.clear()
    before = {kind: signal.signal(kind, _note) for kind in ENDING}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
        _noted.clear()


def raise_noted() -> None:
    """Raises again the exception of the first signal that was noted, if there is one."""
    if _noted:
        _raise(_noted[0])


def _note(number: int, frame: object) -> NoReturn:
    _noted.append(number)
    _raise(number)


def _raise(number: int) -> NoReturn:
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
