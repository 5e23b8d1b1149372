"""Copies between host and device, on two streams per device, one in each direction, and gathers, on a third. No other module creates such
streams.

[Note: Stream order]
A copy starts after the work given to the current stream before the call, and after the copy passed as `after`. `Copy.wait` makes the
current stream wait for the copy without blocking the host. Before the host reads or changes its side, it must call `Copy.synchronize`.
A PCIe link carries both directions at full speed at the same time, so each direction has its own stream.

All calls go through a `StreamApi`, by default torch.cuda's. `tests/core/streams` has one for tensors without values, which checks that
every use of a buffer is ordered after earlier uses. Copies are between tensors of one dtype, or cast.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Blocks the host until the event has happened."""
        ...

    def query(self) -> bool:
        """Whether the event has happened."""
        ...


class Stream(Protocol):
    """A queue of work that runs in order."""

    def wait_event(self, event: Event, /) -> None:
        """Makes later work of the stream start after `event`."""
        ...

    def record_event(self) -> Event:
        """Records the end of the stream's work so far."""
        ...

    def synchronize(self) -> None:
        """Blocks the host until the stream's work is done."""
        ...


class StreamApi(Protocol):
    """Stream functions of a device. has_streams: whether tensor [any shape] is in memory that streams work on."""

    def has_streams(self, tensor: Tensor) -> bool: ...

    def current(self, device: torch.device) -> Stream: ...

    def new(self, device: torch.device) -> Stream: ...

    def use(self, stream: Stream) -> AbstractContextManager: ...  # makes it the current one

    def keep_for(self, tensor: Tensor, *, stream: Stream) -> None: ...  # delays reuse of freed memory

    def is_capturing(self) -> bool: ...  # the current stream is captured into a graph


class CudaStreams:
    """The streams of torch.cuda."""

    def has_streams(self, tensor: Tensor) -> bool:
        """Whether `tensor` (any shape) is on a GPU."""
        return tensor.is_cuda

    def current(self, device: torch.device) -> Stream:
        """This thread's current stream of `device`."""
        return torch.cuda.current_stream(device)

    def new(self, device: torch.device) -> Stream:
        """A stream of the device's pool."""
        return torch.cuda.Stream(device)

    def use(self, stream: Stream) -> AbstractContextManager:
        """Context in which this thread's operations run on `stream`."""
        # pyrefly: ignore[bad-argument-type]  # made by `new` or `current`
        return torch.cuda.stream(stream)

    def keep_for(self, tensor: Tensor, *, stream: Stream) -> None:
        """Delays reuse of the memory of `tensor` (any shape) until the current work of `stream` is done."""
        # pyrefly: ignore[bad-argument-type]  # made by `new` or `current`
        tensor.record_stream(stream)

    def is_capturing(self) -> bool:
        """Whether `torch.cuda.graph` is capturing this thread's current stream."""
        return torch.cuda.is_current_stream_capturing()


class _Active:
    """The API in use."""

    api: StreamApi = CudaStreams()


_active = _Active()


@contextmanager
def use_api(api: StreamApi) -> Iterator[None]:
    """Context in which `api` provides the streams."""
    before, _active.api = _active.api, api
    _forget()
    try:
        yield
    finally:
        _active.api = before
        _forget()


def _forget() -> None:
    """Drops the streams of the API before."""
    _copies.cache_clear()
    _gathers.cache_clear()


def has_streams(tensor: Tensor) -> bool:
    """Whether `tensor` (any shape) is in memory of a device with streams."""
    return _active.api.has_streams(tensor)


def current_event(device: torch.device) -> Event:
    """Event at the end of the current stream's work so far on `device`."""
    return _active.api.current(device).record_event()


def stream_of(tensor: Tensor) -> Stream | None:
    """The stream that computes on the device of `tensor` (any shape), or None if its device has no streams."""
    return _active.api.current(tensor.device) if has_streams(tensor) else None


def order_behind_current(stream: Stream, *, tensor: Tensor) -> None:
    """Makes later work of `stream` start after the work so far of the current stream of the device of `tensor` (any shape)."""
    current = _active.api.current(tensor.device)
    if stream != current:
        stream.wait_event(current.record_event())


def is_capturing(tensor: Tensor) -> bool:
    """Whether operations on `tensor` (any shape) are being captured into a graph. The host must then neither read nor wait."""
    return has_streams(tensor) and _active.api.is_capturing()


class Copy:
    """A copy issued to a stream. `wait` orders the current stream after it, `synchronize` blocks the host."""

    def __init__(self, *, event: Event, device: torch.device) -> None:
        self.event, self._device = event, device

    def wait(self) -> None:
        """Makes later work of the current stream start after the copy, without blocking the host."""
        _active.api.current(self._device).wait_event(self.event)

    def synchronize(self) -> None:
        """Blocks the host until the copy is done."""
        self.event.synchronize()

    def is_completed(self) -> bool:
        """Whether the copy is done."""
        return self.event.query()


class Aside:
    """A place in the order of the current stream, from which work runs next to the stream's later work: on the device's stream of gathers.

    Collectives follow the stream on which they are issued. So one that waits for a copy or for the host does not delay computing, and does not
    wait for later computing.
    """

    def __init__(self, tensor: Tensor) -> None:
        """tensor: a tensor of any shape on the device. Without streams, work runs as everywhere."""
        self._device, self._behind = tensor.device, None
        if has_streams(tensor):
            self._behind = current_event(tensor.device)

    def run(self, task: Callable[[], T]) -> "T | Copy":
        """Calls `task()` and returns its result, an object with `wait()`. If that is None, the result waits for the stream of gathers."""
        if self._behind is None:
            return task()
        stream = _gathers(self._device)
        stream.wait_event(self._behind)
        with _active.api.use(stream):
            pending = task()
        return Copy(event=stream.record_event(), device=self._device) if pending is None else pending


def start_copy(source: Tensor, *, out: Tensor, after: Copy | None = None) -> Copy | None:
    """Starts `out.copy_(source)` on the copy stream of its direction. Returns None, without copying, if both are on the host.

    source, out: tensors of one shape, one on a GPU and the other in page-locked memory. Neither the current stream (before `Copy.wait`) nor
    the host (before `Copy.synchronize`) may change `source` or use `out`. after: an earlier copy that must finish first.
    """
    on_device = next((tensor for tensor in (out, source) if _active.api.has_streams(tensor)), None)
    if on_device is None:
        return None
    to_device, to_host = _copies(on_device.device)
    return copy_on(to_device if on_device is out else to_host, source=source, out=out, after=after)


def copy_on(stream: Stream, *, source: Tensor, out: Tensor, after: Copy | None = None) -> Copy:
    """Like `start_copy`, but on `stream`: `out.copy_(source)` of two tensors of one shape, one of them on a device."""
    on_device = out if _active.api.has_streams(out) else source
    stream.wait_event(current_event(on_device.device))
    if after is not None:
        stream.wait_event(after.event)
    with _active.api.use(stream):
        out.copy_(source, non_blocking=True)
    _active.api.keep_for(on_device, stream=stream)
    return Copy(event=stream.record_event(), device=on_device.device)


def copy_behind(event: Event, *, source: Tensor, out: Tensor) -> None:
    """Copies after `event` and waits: `out.copy_(source)` of two tensors of one shape, one of them on a device. For background threads."""
    device = (out if _active.api.has_streams(out) else source).device
    stream = _active.api.new(device)
    stream.wait_event(event)
    with _active.api.use(stream):
        out.copy_(source, non_blocking=True)
    stream.synchronize()


class Reading:
    """Values being copied to the host. Device work issued before `wait` overlaps with the copy."""

    def __init__(self, values: Tensor) -> None:
        """values: a tensor of any shape, read after the current stream's work so far."""
        self._values, self._copy = values, None
        if has_streams(values):
            self._values = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=values.is_cuda)
            self._copy = start_copy(values, out=self._values)

    def wait(self) -> Tensor:
        """Waits, the first time, and returns the values in host memory."""
        if self._copy is not None:
            self._copy.synchronize()
            self._copy = None
        return self._values


@functools.cache
def _copies(device: torch.device) -> tuple[Stream, Stream]:
    """The copy streams to and from a device."""
    return _active.api.new(device), _active.api.new(device)


@functools.cache
def _gathers(device: torch.device) -> Stream:
    """The stream from which a device's gathers start, see `Aside`."""
    return _active.api.new(device)
