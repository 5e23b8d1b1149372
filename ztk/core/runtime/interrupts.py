"""Ctrl-C and the signals of schedulers during training: every rank stops after the same step, so that a consistent state can be saved."""

import math
import os
import signal
import time
from collections import deque
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from ztk.core.policies.ending import ENDING
from ztk.core.runtime.comm import Comm, connect
from ztk.core.runtime.process import Process

_REPEAT_SECONDS = 1.0  # a terminal and a launcher may both pass on the same Ctrl-C
_LATE_SECONDS = 1.0  # of steps between two exchanges; a scheduler's grace is much longer
_MOST_STEPS = 16
_REMEMBERED = 64  # steps whose longest one decides


class Interrupted(KeyboardInterrupt):
    """A signal ended the training loop after a complete step. number: the signal received by this rank, or None if another rank got it."""

    def __init__(self, number: int | None) -> None:
        super().__init__("interrupted")
        self.number = number


class Interrupts:
    """Context in which the signals of `ENDING` set a flag, which `agree` reports on all ranks after the same step.

    Several ranks exchange the flags every few steps: as many as last a second, by the longest of the last steps on any rank, and at most 16.
    Steps of half a second or more have an exchange each.

    A second signal, at least a second after the first, ends the process at once. Every rank must enter the context. On exit it raises
    Interrupted for a signal that no check has reported yet.

    The flags travel over separate host connections: on a GPU the exchange does not wait for the device, and it is not counted with the
    training's collectives. is_active: if False, signals keep their default effect. agrees: every step needs an exchange, because `ends` may
    differ between ranks. Without both, `agree` costs nothing.
    """

    def __init__(self, process: Process, *, is_active: bool = True, agrees: bool = False) -> None:
        self._process, self._is_active, self._agrees = process, is_active, agrees
        self._number: int | None = None
        self._received = 0.0
        self._before: dict[signal.Signals, Any] = {}
        self._comm: Comm | None = None
        self._last, self._seconds, self._left = 0.0, deque([_LATE_SECONDS], maxlen=_REMEMBERED), 1

    def __enter__(self) -> Self:
        if not (self._is_active or self._agrees):
            return self
        process = self._process
        if process.world_size > 1:
            # A rank that has failed is noticed here by its connection. `connect` would wait for it in the store, for `timeout_seconds`.
            process.comm.barrier()
            self._comm = connect(
                device=torch.device("cpu"),
                one_node=process.local_world_size == process.world_size,
                timeout_seconds=process.timeout_seconds,
            )
        if self._is_active:
            self._before = {kind: signal.signal(kind, self._receive) for kind in ENDING}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # A signal after the last step's check, for example during its save, ends the run here.
        is_late = error is None and self._is_active and self.are_pending()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._comm is not None and error is None:  # after an error the other ranks may be gone
            self._comm.close()
        self._comm = None
        if is_late:
            self.stop()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._number is None:
            self._number, self._received = number, now
        elif now - self._received >= _REPEAT_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def are_pending(self) -> bool:
        """Whether any rank has received a signal. A collective call."""
        own = self._number is not None
        if self._comm is None:
            return own
        return self._comm.any(own, label="interrupts")

    def agree(self, *, ends: bool) -> tuple[bool, bool]:
        """Whether any rank has received a signal, and whether `ends` is set on some ranks and not on others. A collective call.

        Called once or more in each step. One exchange at most unless something is pending.
        """
        own = self._number is not None
        if self._comm is None:
            return own, False
        now, last = time.monotonic(), self._last
        self._last, self._left = now, self._left - 1
        if last:
            self._seconds.append(now - last)
        if self._left > 0 and not self._agrees:
            return False, False
        longest = self._comm.maximum(math.inf if own or ends else max(self._seconds), label="interrupts")
        if longest < math.inf:
            self._left = max(1, min(_MOST_STEPS, int(_LATE_SECONDS / max(longest, 1e-6))))  # the same on all ranks
            return False, False
        received, ended, goes_on = (self._comm.any(flag, label="ends of ranks") for flag in (own, ends, not ends))
        return received, ended and goes_on

    def stop(self) -> None:
        """Raises Interrupted on every rank."""
        raise Interrupted(self._number)
