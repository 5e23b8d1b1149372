"""A model of streams: every use of memory must be ordered after the previous user of that memory.

Every stream and every host thread has a vector clock (Mattern 1989). A kernel or a copy is an event of its stream. It follows the earlier
work of the stream and all events that the issuing host thread has waited for. Recording an event copies the stream's clock; waiting for it
joins it into the clock of a stream or a thread. Two uses of the same bytes, of which one writes, are a race unless the later clock contains
the earlier one. So are the use of memory on one stream and its return to the allocator, which hands it out again on the stream of its
allocation, unless `keep_for` has registered the use.

The model runs a plan. Its tensors have storages and no values, and a dispatch mode intercepts every operation. Storages of
`ztk.core.runtime.planned.host_bytes` are host memory, which no collective may move, because NCCL cannot.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ztk.core.runtime.comm.planned import PlannedTransport
from ztk.core.runtime.io import Direction
from ztk.core.runtime.planned import is_host_memory
from ztk.core.runtime.serial import InlineCalls
from ztk.core.runtime.streams import use_api
from ztk.planner.tracker import is_work, tensors_in, written
from ztk.zero.offload.io_engine import Transfer
from ztk.zero.offload.nvme import NvmeStore
from ztk.zero.offload.planned import PlannedIo
from ztk.zero.offload.pool import AlignedPool, Lease

Clock = dict[str, int]  # name of a stream or thread -> how many of its events are known
MAX_RACES = 20  # that are described


@dataclass(slots=True, eq=False, kw_only=True)
class Moment:
    """An event: the clock of a stream at the time of recording."""

    clock: Clock
    model: "StreamModel" = field(repr=False)

    def synchronize(self) -> None:
        self.model.join_host(self.clock)

    def query(self) -> bool:
        return False


@dataclass(slots=True, eq=False, kw_only=True)
class ModelStream:
    """A stream, or a thread of the host, which is one too."""

    name: str
    model: "StreamModel" = field(repr=False)
    clock: Clock = field(default_factory=dict)

    def wait_event(self, event: Moment, /) -> None:
        _join(self.clock, event.clock)

    def record_event(self) -> Moment:
        return Moment(clock=dict(self.clock), model=self.model)

    def synchronize(self) -> None:
        self.model.join_host(self.clock)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """Bytes [start, stop) of a storage were used at `tick` of `stream`."""

    start: int
    stop: int
    stream: str
    tick: int
    writes: bool
    what: str


@dataclass(slots=True, eq=False, kw_only=True)
class _Memory:
    """A storage. on_host: it is host memory. allocated_on: the stream that may have it again when it is freed."""

    on_host: bool
    allocated_on: str
    uses: list[_Use] = field(default_factory=list)
    kept_for: set[str] = field(default_factory=set)


class StreamModel(TorchDispatchMode):
    """The streams of a plan, and its `ztk.core.runtime.streams.StreamApi`. races: one line per unordered use of memory.

    checked: number of checked uses of memory. waits: number of host waits. captures: work given to streams becomes a graph.
    """

    sees_everything = True  # also operations that ZeRO hides from modes, see `ztk.core.runtime.dispatch_modes`

    def __init__(self) -> None:
        super().__init__()
        self.races: list[str] = []
        self.checked = self.waits = 0
        self.captures = False
        self._memories: dict[int, _Memory] = {}
        self._names: dict[str, int] = {}
        self._streams: list[ModelStream] = []
        self._compute = self._named("compute")
        self._hosts = [self._named("host")]  # the innermost thread that is being modelled last
        self._used = [self._compute]
        self._results: dict[
            int, tuple[object, Clock]
        ] = {}  # by identity, with the object itself, so that it stays the only one

    # The API of streams #

    def has_streams(self, tensor: Tensor) -> bool:
        return tensor.is_meta and not self._is_host(tensor)

    def current(self, device: torch.device) -> ModelStream:
        return self._used[-1]

    def new(self, device: torch.device) -> ModelStream:
        return self._named("copy")

    @contextlib.contextmanager
    def use(self, stream: ModelStream) -> Iterator[None]:
        self._used.append(stream)
        try:
            yield
        finally:
            self._used.pop()

    def keep_for(self, tensor: Tensor, *, stream: ModelStream) -> None:
        self._memory(tensor).kept_for.add(stream.name)

    def is_capturing(self) -> bool:
        return self.captures

    def join_host(self, clock: Clock) -> None:
        """Joins `clock` into the current host thread's clock."""
        self.waits += 1
        _join(self._hosts[-1].clock, clock)

    # Operations #

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [value for value in tensors_in(*args, *kwargs.values()) if value.is_meta]
        out = func(*args, **kwargs)
        results = [value for value in tensors_in(out) if value.is_meta]
        if func.is_view or not (given or results):
            return out
        changed = written(func, args=args) + [value for value in (kwargs.get("out"),) if isinstance(value, Tensor)]
        places = {tensor.untyped_storage()._cdata for tensor in given}
        fresh = [tensor for tensor in results if tensor.untyped_storage()._cdata not in places]
        on_host = bool(given) and all(self._is_host(tensor) for tensor in given)
        for tensor in fresh:
            self._see(tensor, on_host=on_host)
        if not is_work(func) or "empty" in func.name():  # new_empty does not read its argument
            return out
        overwritten = (args[0],) if func is torch.ops.aten.copy_.default else ()  # written, not read
        reads = [tensor for tensor in given if not any(tensor is other for other in overwritten)]
        self._run(str(func), reads=reads, writes=[*changed, *fresh], blocking=_is_blocking(func, args, kwargs))
        return out

    def _run(self, what: str, *, reads: list[Tensor], writes: list[Tensor], blocking: bool = False) -> None:
        """One operation: on the host if all its memory is there, else on the current stream."""
        tensors = [tensor for tensor in (*reads, *writes) if tensor.is_meta]
        on_host = {self._is_host(tensor) for tensor in tensors}
        if on_host == {True, False} and "copy_" not in what:
            self._report(f"{what} on {self._used[-1].name} uses memory of the host and of the device")
        stream = self._hosts[-1] if on_host == {True} else self._used[-1]
        self.launch(stream, what=what, reads=reads, writes=writes)
        if blocking and on_host == {True, False}:
            self.join_host(stream.clock)

    def launch(self, stream: ModelStream, *, what: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        """`stream` is given work by the host's thread that runs now."""
        _join(stream.clock, self._hosts[-1].clock)
        stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                if tensor.is_meta:
                    self._use(tensor, stream=stream, what=what, writes=is_write)

    def _use(self, tensor: Tensor, *, stream: ModelStream, what: str, writes: bool) -> None:
        memory, (start, stop) = self._memory(tensor), _extent(tensor)
        self.checked += 1
        kept = []
        for use in memory.uses:
            overlaps = use.start < stop and start < use.stop
            is_known = stream.clock.get(use.stream, 0) >= use.tick
            if overlaps and (writes or use.writes) and not is_known:
                self._report(
                    f"{stream.name}: {what} {'writes' if writes else 'reads'} bytes {start} to {stop} of a {_kind(memory)} buffer, while "
                    f"{use.stream}: {use.what} {'writes' if use.writes else 'reads'} them"
                )
            covered = start <= use.start and use.stop <= stop and is_known
            if not (covered and (writes or not use.writes)):
                kept.append(use)
        new = _Use(start=start, stop=stop, stream=stream.name, tick=stream.clock[stream.name], writes=writes, what=what)
        memory.uses = [*kept, new]

    # Memory #

    def _memory(self, tensor: Tensor) -> _Memory:
        self._see(tensor, on_host=False)
        return self._memories[tensor.untyped_storage()._cdata]

    def _see(self, tensor: Tensor, *, on_host: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._memories:
            return
        self._memories[key] = _Memory(on_host=on_host or is_host_memory(storage), allocated_on=self._used[-1].name)
        weakref.finalize(storage, self._freed, key).atexit = False

    def _freed(self, key: int) -> None:
        """The allocator may hand the memory out again, on the stream of its allocation."""
        memory = self._memories.pop(key)
        if memory.on_host:
            return  # page-locked memory waits for copies that torch has started from it; pageable memory is copied by the host
        owner = self._clock_of(memory.allocated_on)
        for use in memory.uses:
            if use.stream not in memory.kept_for and owner.get(use.stream, 0) < use.tick:
                self._report(f"a buffer of {memory.allocated_on} is freed while {use.stream}: {use.what} uses it")

    def _clock_of(self, name: str) -> Clock:
        known = dict(next(stream.clock for stream in self._streams if stream.name == name))
        _join(known, self._hosts[-1].clock)  # this thread issues the work of the next user of the memory
        return known

    def _is_host(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        memory = self._memories.get(storage._cdata)
        return is_host_memory(storage) if memory is None else memory.on_host

    # Threads of the host #

    @contextlib.contextmanager
    def thread(self) -> Iterator[ModelStream]:
        """Inside, the host runs as another, newly started thread. A thread that waits for one of its published results follows it."""
        thread = self._named("thread")
        _join(thread.clock, self._hosts[-1].clock)
        self._hosts.append(thread)
        self._used.append(self._compute)
        try:
            yield thread
        finally:
            self._hosts.pop()
            self._used.pop()

    def publish(self, result: object) -> None:
        """The current thread publishes `result`, or releases a lock with this identity."""
        _, clock = self._results.setdefault(id(result), (result, {}))
        _join(clock, self._hosts[-1].clock)

    def await_thread(self, result: object) -> None:
        """The thread that runs now has waited for `result`."""
        _, clock = self._results.get(id(result), (None, {}))
        self.join_host(clock)

    # Utilities #

    def _named(self, kind: str) -> ModelStream:
        self._names[kind] = self._names.get(kind, 0) + 1
        number = self._names[kind]
        made = ModelStream(name=kind if number == 1 else f"{kind} {number}", model=self)
        self._streams.append(made)
        return made

    def _report(self, race: str) -> None:
        if len(self.races) < MAX_RACES and race not in self.races:
            self.races.append(race)


def _join(clock: Clock, other: Clock) -> None:
    for name, tick in other.items():
        if clock.get(name, 0) < tick:
            clock[name] = tick


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage between the first and the last element."""
    start = tensor.storage_offset()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    stop = start + last + 1 if tensor.numel() else start
    return start * tensor.element_size(), stop * tensor.element_size()


def _is_blocking(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> bool:
    """A copy between host and device that the host waits for."""
    if func is not torch.ops.aten.copy_.default:
        return False
    return not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))


def _kind(memory: _Memory) -> str:
    return "host" if memory.on_host else "device"


# A plan under the model #


class _Sent:
    """A collective on its stream. Like NCCL's Work it keeps its tensors until a wait."""

    def __init__(self, moment: Moment, *, model: StreamModel, tensors: list[Tensor]) -> None:
        self._moment, self._model, self._tensors = moment, model, tensors

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        """The current stream waits, not the host."""
        self._model.current(torch.device("meta")).wait_event(self._moment)
        self._tensors.clear()


@contextlib.contextmanager
def modelled() -> Iterator[StreamModel]:
    """Plans created inside run on the streams of the yielded model."""
    model = StreamModel()
    wires: dict[int, ModelStream] = {}

    def collective(transport: PlannedTransport, kind: str, *, reads: list[Tensor], writes: list[Tensor]) -> _Sent:
        wire = wires.setdefault(id(transport), model._named("wire"))
        if any(tensor.is_meta and model._is_host(tensor) for tensor in (*reads, *writes)):
            model._report(f"{wire.name}: {kind} moves memory of the host, which is not NCCL's to move")
        wire.wait_event(model.current(torch.device("meta")).record_event())
        model.launch(wire, what=kind, reads=reads, writes=writes)
        return _Sent(wire.record_event(), model=model, tensors=[*reads, *writes])

    def in_place(transport, full, *, label, **_):
        return collective(transport, "all_gather", reads=[full], writes=[full])

    def reduced(transport, full, *, out, label):
        return collective(transport, "reduce_scatter", reads=[full], writes=[out])

    def exchanged(transport, source, *, out, label, **_):
        return collective(transport, "all_to_all", reads=[source], writes=[out])

    def broadcast(transport, tensor, *, source, label):
        return collective(transport, "broadcast", reads=[tensor], writes=[tensor])

    def sent(transport, tensor, *, to, label):
        return collective(transport, "send", reads=[tensor], writes=[])

    def received(transport, out, *, source, label):
        return collective(transport, "recv", reads=[], writes=[out])

    transports = {
        "all_gather": in_place,
        "reduce_scatter": reduced,
        "all_to_all": exchanged,
        "all_to_all_uneven": exchanged,
        "broadcast": broadcast,
        "send": sent,
        "recv": received,
    }
    with contextlib.ExitStack() as stack:
        for name, function in transports.items():
            stack.enter_context(mock.patch.object(PlannedTransport, name, function))
        for patch in _threads_of(model):
            stack.enter_context(patch)
        stack.callback(model._results.clear)  # or they keep storages, whose finalizers keep the model
        stack.enter_context(use_api(model))
        stack.enter_context(model)
        yield model


def _threads_of(model: StreamModel) -> list:
    """Runs a plan's inline calls as calls of threads: disk transfers, and the update during the forward."""
    start, wait_for, submit = PlannedIo._start, NvmeStore.wait_for, InlineCalls.submit
    set_result, result, give, take = Future.set_result, Future.result, AlignedPool.give, AlignedPool.take_range
    here = threading.get_ident()

    def start_in_thread(engine: PlannedIo, transfer: Transfer) -> None:
        with model.thread() as thread:
            if (
                transfer.memory is not None
                and is_host_memory(transfer.memory.untyped_storage())
                and transfer.padded_bytes
            ):
                is_read = transfer.direction is Direction.read
                touched = {
                    "reads": [] if is_read else [transfer.memory],
                    "writes": [transfer.memory] if is_read else [],
                }
                model.launch(thread, what=f"disk {transfer.direction.name}", **touched)
            start(engine, transfer)
            model.publish(transfer)

    def wait_for_thread(store: NvmeStore, transfer: Transfer) -> None:
        wait_for(store, transfer)
        model.await_thread(transfer)

    def submit_to_thread(calls: InlineCalls, call: Callable) -> Future:
        with model.thread():
            return submit(calls, call)

    def set_in_thread(future: Future, value: object) -> None:
        if threading.get_ident() == here:
            model.publish(future)
        set_result(future, value)

    def wait_for_result(future: Future, timeout: float | None = None) -> object:
        value = result(future, timeout)
        if threading.get_ident() == here:
            model.await_thread(future)
        return value

    def give_with_lock(pool: AlignedPool, lease: Lease) -> None:
        model.publish(pool)
        give(pool, lease)

    def take_with_lock(pool: AlignedPool, nbytes: int) -> Lease | None:
        model.await_thread(pool)
        return take(pool, nbytes)

    return [
        mock.patch.object(AlignedPool, "give", give_with_lock),
        mock.patch.object(AlignedPool, "take_range", take_with_lock),
        mock.patch.object(PlannedIo, "_start", start_in_thread),
        mock.patch.object(NvmeStore, "wait_for", wait_for_thread),
        mock.patch.object(InlineCalls, "submit", submit_to_thread),
        mock.patch.object(Future, "set_result", set_in_thread),
        mock.patch.object(Future, "result", wait_for_result),
    ]
