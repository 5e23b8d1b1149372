"""Handles of what is under way: a read, a write, a copy, a collective."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from ztk.core.runtime.streams import Copy


class Pending(Protocol):
    """Something under way. `wait()` returns when it is over, with its tensor, of any shape, if it has one, and raises what went wrong."""

    def wait(self) -> Tensor | None: ...


class Handle:
    """A `Pending` with a value that is known at once.

    value: what `wait()` returns, of any shape. finish: called by every `wait()` before it returns; None: it is over already.
    is_immediate: a collective that has to wait for it may start at once, on every rank alike (see `Comm.all_gather`).
    copy: what the value comes by, if `finish` does nothing but wait for it; a collective may be issued on its stream.
    """

    def __init__(
        self,
        value: Tensor | None = None,
        *,
        finish: Callable[[], object] | None = None,
        is_immediate: bool = False,
        copy: Copy | None = None,
    ) -> None:
        self.is_immediate, self.copy = is_immediate, copy
        self._value, self._finish = value, finish

    def wait(self) -> Tensor | None:
        if self._finish is not None:
            self._finish()
        return self._value


def then(work: Pending, *, action: Callable[[], object], is_immediate: bool = False) -> Handle:
    """`work` followed by `action()`. The first `wait()` calls it; later ones do nothing."""
    actions = [action]

    def finish() -> None:
        action = actions.pop() if actions else None
        work.wait()
        if action is not None:
            action()

    return Handle(finish=finish, is_immediate=is_immediate)
