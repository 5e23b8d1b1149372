"""Seconds, calls and bytes of every op in a period: `with KernelTimes() as times: ...`, then `times.read()`.

[Note: Times]
On a GPU, events before and after the op's launches are recorded in its stream and read after the step, with a single wait for the
device. If the GPU waits for the host, an op's time therefore includes its launch. On a CPU the clock is read before and after. Ops of
all threads count in the period in which they begin. Ops of a call wrapped by `behind_step`, such as the update during the next forward,
count in full in the period after the one in which it was wrapped. The time of an op that calls another one, such as
`linear_cross_entropy`, includes the other's.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch

from ztk.kernels.launch.library import get_watch, set_watch
from ztk.kernels.work import Work, work_of


class _Event(Protocol):
    def record(self) -> None: ...

    def elapsed_time(self, end_event: Any) -> float: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """Peak rates of a device: bytes per second of its memory, and operations per second of products by dtype. Missing dtypes
    compute at the rate of float32."""

    memory_bandwidth: float
    rates: Mapping[torch.dtype, float] = field(default_factory=dict)

    def seconds(self, *, num_bytes: int, flops: int, dtype: torch.dtype) -> float:
        """The floor of a call in seconds: the longer of moving and computing. Computing counts 0 for dtypes without a rate."""
        rate = self.rates.get(dtype) or self.rates.get(torch.float32)
        return max(num_bytes / self.memory_bandwidth, flops / rate if rate else 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelTime:
    """All calls of one op. floor_seconds: see `Ceilings`; None without ceilings."""

    calls: int
    seconds: float
    num_bytes: int
    floor_seconds: float | None


# The op, the bytes and operations of the call, and its seconds or a pair of events. Plain tuples, because one is made per call.
_Call = tuple[str, Work, float | tuple[_Event, _Event]]


class KernelTimes:
    """Times every ztk op of this process, period by period. ceilings: the device's rates. If omitted, there are no floors."""

    def __init__(
        self,
        *,
        ceilings: Ceilings | None = None,
        event: Callable[[], _Event] = lambda: torch.cuda.Event(enable_timing=True),
        synchronize: Callable[[], None] = torch.cuda.synchronize,
    ) -> None:
        """event, synchronize: functions of the GPU, replaced in tests."""
        self._ceilings, self._event, self._synchronize = ceilings, event, synchronize
        self._current: list[_Call] | None = None  # of this period; None if its ops are not timed
        self._next: list[_Call] | None = None  # of the next one
        self._ended: list[_Call] = []
        self._bound: dict[int, list[_Call] | None] = {}  # by thread: the list for its ops
        self._is_on_gpu = False

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        self.close()

    def begin(self, *, current: bool = True, following: bool = False) -> None:
        """Begins a period. current: times its ops; following: times the next period's.

        Raises:
            RuntimeError: another `KernelTimes` is at work in this process.
        """
        if get_watch() not in (None, self):
            raise RuntimeError("the ops of this process are being timed already: close the other KernelTimes first")
        ahead, self._next = self._next, [] if following else None
        self._current = (ahead if ahead is not None else []) if current else None
        set_watch(self if current or following else None)

    def end(self) -> None:
        """The period ends; `read` returns its calls."""
        self._ended, self._current = [] if self._current is None else self._current, None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context whose ops do not count, except calls of `behind_step`."""
        current, self._current = self._current, None
        try:
            yield
        finally:
            self._current = current

    def close(self) -> None:
        """Ends the period. The ops are as they were registered."""
        if self._current is not None:
            self.end()
        self._next = None
        if get_watch() is self:
            set_watch(None)

    def read(self) -> dict[str, KernelTime]:
        """By op, in the order of their first calls, of the period that has ended. Waits for the GPU, once, if ops ran there."""
        calls, self._ended = self._ended, []
        if self._is_on_gpu:
            self._synchronize()
        found: dict[str, KernelTime] = {}
        for name, work, clock in calls:
            seconds = clock if isinstance(clock, float) else clock[0].elapsed_time(clock[1]) / 1e3
            found[name] = self._added(found.get(name), work=work, seconds=seconds)
        return found

    def bind(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """`call`, whose ops belong to the next period, whenever they run."""
        calls = self._next

        def bound() -> Any:
            thread = threading.get_ident()
            self._bound[thread] = calls
            try:
                return call()
            finally:
                del self._bound[thread]

        return bound

    def __call__(self, name: str, run: Callable, args: tuple, *, on_gpu: bool) -> Any:
        """Runs an op; see `Watch`."""
        calls = self._bound.get(threading.get_ident(), self._current) if self._bound else self._current
        if calls is None or (on_gpu and torch.cuda.is_current_stream_capturing()):  # a graph's events cannot be read
            return run(*args)
        if not on_gpu:
            begin = time.perf_counter()
            result = run(*args)
            spent = time.perf_counter() - begin
            calls.append((name, work_of(name, args=args, result=result), spent))
            return result
        first, last = self._event(), self._event()
        first.record()
        result = run(*args)
        last.record()
        self._is_on_gpu = True
        calls.append((name, work_of(name, args=args, result=result), (first, last)))
        return result

    def _added(self, before: KernelTime | None, *, work: Work, seconds: float) -> KernelTime:
        floor, num_bytes = None, int(work.num_bytes * work.share()) if work.share else work.num_bytes
        if self._ceilings is not None:
            flops = work.flops() if work.flops else 0
            floor = self._ceilings.seconds(num_bytes=num_bytes, flops=flops, dtype=work.dtype)
        if before is None:
            return KernelTime(calls=1, seconds=seconds, num_bytes=num_bytes, floor_seconds=floor)
        return KernelTime(
            calls=before.calls + 1,
            seconds=before.seconds + seconds,
            num_bytes=before.num_bytes + num_bytes,
            floor_seconds=None if floor is None or before.floor_seconds is None else before.floor_seconds + floor,
        )
