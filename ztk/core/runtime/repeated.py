"""Values that the host has read in a forward, used again when the backward repeats that forward (`ztk.parallel.recompute`).

A repetition has the values of its forward. So the host need not wait for the device a second time.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from ztk.core.runtime.planned import note_read
from ztk.core.runtime.streams import Reading


@dataclass(frozen=True, kw_only=True, slots=True)
class _Read:
    """values: on the device, any shape. on_host: waits for them."""

    values: Tensor
    on_host: Callable[[], Tensor]


class _Forward:
    """Context around a forward, which records its reads."""

    def __init__(self) -> None:
        self.reads: list[_Read] = []

    def __enter__(self) -> None:
        _active.contexts.append(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _active.contexts.pop()


class _Repetition:
    """Context around a repetition of `forward`. A graph that is kept is repeated once per backward."""

    def __init__(self, forward: _Forward) -> None:
        self._forward = forward
        self._used: list[int] = []  # reads of this repetition so far, the innermost last

    def __enter__(self) -> None:
        self._used.append(0)
        _active.contexts.append(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _active.contexts.pop()
        self._used.pop()

    def next(self) -> _Read:
        number = self._used[-1]
        if number == len(self._forward.reads):
            raise RuntimeError(
                f"recompute: the backward repeats a block whose forward had {number} reads of the device, and the repetition has more: the "
                "block must compute the same both times"
            )
        self._used[-1] += 1
        return self._forward.reads[number]


class _Active(threading.local):
    """contexts: those that this thread is inside of, the innermost last."""

    def __init__(self) -> None:
        self.contexts: list[_Forward | _Repetition] = []


_active = _Active()


def contexts() -> tuple[_Forward, _Repetition]:
    """A pair of contexts: around a forward, and around its repetition."""
    forward = _Forward()
    return forward, _Repetition(forward)


def start_reading(values: Tensor, *, name: str) -> Callable[[], Tensor]:
    """Starts to copy `values` (any shape) to the host, and returns a function that waits for them. Work that is issued in between overlaps.

    A repetition returns the forward's values and waits for nothing. The device compares them with its own, and fails if they differ.
    name: label of the values, see `ztk.core.runtime.planned.watch_reads`.
    """
    repetition, within = None, list[_Forward]()
    for context in reversed(_active.contexts):
        if isinstance(context, _Repetition):
            repetition = context
            break
        within.append(context)  # a block inside of the repeated one, which may be repeated alone later
    if repetition is None:
        note_read(name)
        read = _Read(values=values, on_host=Reading(values).wait)
    else:
        read = repetition.next()
        torch._assert_async((values == read.values).all(), f"recompute: {name} differ in the repetition of a block")
    for forward in within:
        forward.reads.append(read)
    return read.on_host
