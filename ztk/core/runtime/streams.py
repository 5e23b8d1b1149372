"""The one owner of copy streams: copies between host and device run on two streams of their own, one in each direction.

[Note: What orders what]
A copy starts behind the work that the current stream had been given before the call, and behind the copy it is told of. Afterwards
`Copy.wait` makes the current stream wait for it, and the host goes on; before the host reads or changes its side, it calls
`Copy.synchronize`. A PCIe link carries both directions at full speed at one time, so each has a stream.

Everything here goes through a `StreamApi`. The usual one is torch.cuda's; `tests/core/streams` has one that checks, on tensors without values,
that whatever uses a buffer is ordered behind whoever used it before. Copies are between tensors of one dtype, or cast.
"""

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A moment of a stream."""

    def synchronize(self) -> None:
        """The host waits for it."""
        ...

    def query(self) -> bool:
        """It is over."""
        ...


class Stream(Protocol):
    """Work in order."""

    def wait_event(self, event: Event, /) -> None:
        """What is given to the stream from now on starts behind `event`."""
        ...

    def record_event(self) -> Event:
        """The end of what the stream has been given so far."""
        ...

    def synchronize(self) -> None:
        """The host waits for all of it."""
        ...


class StreamApi(Protocol):
    """What a device offers. has_streams: tensor [any shape] is in memory that streams work on."""

    def has_streams(self, tensor: Tensor) -> bool: ...

    def current(self, device: torch.device) -> Stream: ...

    def new(self, device: torch.device) -> Stream: ...

    def use(self, stream: Stream) -> AbstractContextManager: ...  # makes it the current one

    def keep_for(self, tensor: Tensor, *, stream: Stream) -> None: ...  # freed memory is not handed out before

    def is_capturing(self) -> bool: ...  # what the current stream is given becomes a graph, and does not run yet


class CudaStreams:
    """The streams of torch.cuda."""

    def has_streams(self, tensor: Tensor) -> bool:
        """`tensor`, of any shape, is on a GPU."""
        return tensor.is_cuda

    def current(self, device: torch.device) -> Stream:
        """The stream that this thread's operations on `device` go to."""
        return torch.cuda.current_stream(device)

    def new(self, device: torch.device) -> Stream:
        """One of the device's pool of streams."""
        return torch.cuda.Stream(device)

    def use(self, stream: Stream) -> AbstractContextManager:
        """Inside, operations of this thread go to `stream`."""
        # pyrefly: ignore[bad-argument-type]  # made by `new` or `current`
        return torch.cuda.stream(stream)

    def keep_for(self, tensor: Tensor, *, stream: Stream) -> None:
        """The memory of `tensor`, of any shape, is handed out again only behind what `stream` has been given so far."""
        # pyrefly: ignore[bad-argument-type]  # made by `new` or `current`
        tensor.record_stream(stream)

    def is_capturing(self) -> bool:
        """`torch.cuda.graph` records what this thread's current stream is given."""
        return torch.cuda.is_current_stream_capturing()


class _Active:
    """The API in use."""

    api: StreamApi = CudaStreams()


_active = _Active()


@contextmanager
def use_api(api: StreamApi) -> Iterator[None]:
    """Inside, streams are those of `api`."""
    before, _active.api = _active.api, api
    _copies.cache_clear()
    try:
        yield
    finally:
        _active.api = before
        _copies.cache_clear()


def has_streams(tensor: Tensor) -> bool:
    """`tensor`, of any shape, is in memory of a device whose work runs on streams."""
    return _active.api.has_streams(tensor)


def current_event(device: torch.device) -> Event:
    """The end of what the current stream of `device` has been given so far."""
    return _active.api.current(device).record_event()


def stream_of(tensor: Tensor) -> Stream | None:
    """The stream that computes where `tensor`, of any shape, is; None: it is in memory without streams."""
    return _active.api.current(tensor.device) if has_streams(tensor) else None


def order_behind_current(stream: Stream, *, tensor: Tensor) -> None:
    """What `stream` is given from now on starts behind what the current stream of the device of `tensor`, of any shape, was given so far."""
    current = _active.api.current(tensor.device)
    if stream != current:
        stream.wait_event(current.record_event())


def is_capturing(tensor: Tensor) -> bool:
    """What is done with `tensor`, of any shape, becomes part of a graph: the host may neither read it nor wait for it now."""
    return has_streams(tensor) and _active.api.is_capturing()


class Copy:
    """A copy that was given to a stream. `Handle`s and the current stream wait by `wait`, the host by `synchronize`."""

    def __init__(self, *, stream: Stream, event: Event, device: torch.device) -> None:
        self.event = event
        self._stream, self._device = stream, device

    def wait(self) -> None:
        """What the current stream is given from now on finds the copy done. The host does not wait."""
        _active.api.current(self._device).wait_event(self.event)

    def synchronize(self) -> None:
        """The host waits until the copy is done."""
        self.event.synchronize()

    def is_completed(self) -> bool:
        """It is done."""
        return self.event.query()

    def on_its_stream(self) -> AbstractContextManager:
        """Inside, the current stream is the copy's: what is issued there is ordered behind it, and computing goes on."""
        return _active.api.use(self._stream)


def start_copy(source: Tensor, *, out: Tensor, after: Copy | None = None) -> Copy | None:
    """Starts `out.copy_(source)` on a stream of its direction; None: both are on the host, and nothing was done.

    source, out: tensors of one shape, of which one may be on a GPU and the other in page-locked memory. Until `Copy.wait` the current
    stream, and until `Copy.synchronize` the host, must not change `source` or use `out`. after: an earlier copy that this one follows.
    """
    on_device = next((tensor for tensor in (out, source) if _active.api.has_streams(tensor)), None)
    if on_device is None:
        return None
    to_device, to_host = _copies(on_device.device)
    return copy_on(to_device if on_device is out else to_host, source=source, out=out, after=after)


def copy_on(stream: Stream, *, source: Tensor, out: Tensor, after: Copy | None = None) -> Copy:
    """As `start_copy`, on `stream`: `out.copy_(source)` of two tensors of one shape, one of them on a device."""
    on_device = out if _active.api.has_streams(out) else source
    stream.wait_event(current_event(on_device.device))
    if after is not None:
        stream.wait_event(after.event)
    with _active.api.use(stream):
        out.copy_(source, non_blocking=True)
    _active.api.keep_for(on_device, stream=stream)
    return Copy(stream=stream, event=stream.record_event(), device=on_device.device)


def copy_behind(event: Event, *, source: Tensor, out: Tensor) -> None:
    """`out.copy_(source)` of two tensors of one shape, one of them on a device, behind `event`: for a thread of its own. Done on return."""
    device = (out if _active.api.has_streams(out) else source).device
    stream = _active.api.new(device)
    stream.wait_event(event)
    with _active.api.use(stream):
        out.copy_(source, non_blocking=True)
    stream.synchronize()


class Reading:
    """Values on their way to the host: what the device is given between the start and `wait` runs while the host waits for them."""

    def __init__(self, values: Tensor) -> None:
        """values: a tensor of any shape, as the current stream leaves it."""
        self._values, self._copy = values, None
        if has_streams(values):
            self._values = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=values.is_cuda)
            self._copy = start_copy(values, out=self._values)

    def wait(self) -> Tensor:
        """The values, in the host's memory."""
        if self._copy is not None:
            self._copy.synchronize()
        return self._values


@functools.cache
def _copies(device: torch.device) -> tuple[Stream, Stream]:
    """The streams to a device and from it."""
    return _active.api.new(device), _active.api.new(device)
