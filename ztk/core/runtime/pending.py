"""Handles of asynchronous work: reads, writes, copies, collectives."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Pending(Protocol):
    """Asynchronous work. `wait()` returns when it is done, with its tensor (any shape) if there is one, and raises its error."""

    def wait(self) -> Tensor | None: ...


class Handle:
    """A `Pending` whose value is available immediately.

    value: the return value of `wait()`, of any shape. finish: called by every `wait()` before it returns. If omitted, the work is done.
    is_immediate: a collective that depends on it may start at once, on every rank alike (see `Comm.all_gather`).
    """

    def __init__(
        self,
        value: Tensor | None = None,
        *,
        finish: Callable[[], object] | None = None,
        is_immediate: bool = False,
    ) -> None:
        self.is_immediate = is_immediate
        self._value, self._finish = value, finish

    def wait(self) -> Tensor | None:
        if self._finish is not None:
            self._finish()
        return self._value


def then(work: Pending, *, action: Callable[[], object], is_immediate: bool = False) -> Handle:
    """`work` followed by `action()`. The first `wait()` calls `action`; later ones do nothing."""
    actions = [action]

    def finish() -> None:
        action = actions.pop() if actions else None
        work.wait()
        if action is not None:
            action()

    return Handle(finish=finish, is_immediate=is_immediate)
