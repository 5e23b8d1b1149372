"""NCCL for tests without a GPU: a process group for `NcclTransport` whose collectives end as late as NCCL may end them.

A collective of NCCL runs on a stream of its communicator while the host goes on. Its result must not be read, and its memory must not be
written, before the host has called `wait`. A CPU transport cannot show such a mistake every time, because its collectives often end early.
This stand-in finds each one every time:

- A result is 0xFF bytes (NaN in every floating-point dtype) until `wait` of this collective, or of a later one of the same communicator.
- A sent tensor or a result that the program writes before the wait raises `Race`.
- A collective on memory that a running one of another communicator writes, or that it would write under a running one, raises `Race`.
- Messages of two ranks share one stream, as NCCL's do: both ranks must post them in the same order, or `wait` raises `Race`.

The bytes move in private memory, over a `Comm` of the CPU that starts some collectives after a random delay.
"""

import ctypes
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.ranks import RankPool
from ztk.core.runtime import Comm, Process
from ztk.core.runtime.comm import CommCounters, Work, connect_groups
from ztk.core.runtime.comm.nccl import NcclTransport
from ztk.core.runtime.comm.transport import SingleRankTransport
from ztk.core.runtime.comm.watchdog import Watchdog
from ztk.core.runtime.process import all_replicas
from ztk.core.runtime.serial import SerialThread

DELAY_SECONDS, DELAYED = 2e-4, 1 / 8  # the longest delay, and the share of collectives that have one
CPU = torch.device("cpu")
_connected = itertools.count(1 << 20)  # numbers that `connect` does not use


class Race(RuntimeError):
    """Two accesses to memory without an order between them, or messages in different orders."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of this process. They are read and written without torch, which neither modes nor autograd see, like NCCL's accesses."""

    start: int
    nbytes: int

    @staticmethod
    def of(tensor: Tensor) -> "Memory":
        """The memory of `tensor` (contiguous, any shape)."""
        assert tensor.is_contiguous()
        return Memory(tensor.data_ptr(), tensor.numel() * tensor.itemsize)

    def overlaps(self, other: "Memory") -> bool:
        return self.start < other.start + other.nbytes and other.start < self.start + self.nbytes

    def read(self) -> bytes:
        return ctypes.string_at(self.start, self.nbytes)

    def write(self, data: bytes) -> None:
        ctypes.memmove(self.start, data, self.nbytes)

    def poison(self) -> None:
        ctypes.memset(self.start, 0xFF, self.nbytes)


@dataclass(eq=False, slots=True)
class Flight:
    """A collective or a message that the host has issued and not waited for."""

    name: str
    channel: "Channel"
    reads: list[Memory]
    writes: list[tuple[Memory, Memory]]  # the caller's memory, and the private result's
    works: list[Any] = field(default_factory=list)  # of the inner `Comm`
    held: tuple = ()  # tensors whose memory must stay
    expected: list[bytes] = field(default_factory=list)  # contents of `reads` after the start
    is_shared: bool = False  # another flight of the channel uses the same memory, in the stream's order
    race: Race | None = None
    has_landed: bool = False
    lock: Any = field(default_factory=threading.RLock)

    def is_completed(self) -> bool:
        return all(work.is_done for work in self.works)

    def wait(self, timeout: Any = None) -> None:
        """Orders the caller after this flight and the earlier ones of its channel."""
        for flight in self.channel.until(self):
            flight.land()

    def land(self) -> None:
        """Waits, and shows the result."""
        with self.lock:
            if self.has_landed:
                return
            self.has_landed = True
            try:
                for work in self.works:
                    work.wait()
                if self.race is not None:
                    raise self.race
                self._compare()
                for memory, result in self.writes:
                    memory.write(result.read())
            finally:
                self.held, self.works = (), []
                SKY.remove(self)

    def _compare(self) -> None:
        if self.is_shared:
            return
        if any(memory.read() != before for memory, before in zip(self.reads, self.expected, strict=True)):
            raise SKY.report(f"{self.name}: the sent memory was written before the wait")
        if any(memory.read() != b"\xff" * memory.nbytes for memory, _ in self.writes):
            raise SKY.report(f"{self.name}: the result's memory was written before the wait")


class Channel:
    """A stream of NCCL: flights in the order in which they were issued."""

    def __init__(self) -> None:
        self.flights: list[Flight] = []
        # Of messages alone:
        self.issued = 0
        self.thread: SerialThread | None = None
        self.is_broken = False

    def until(self, last: Flight) -> list[Flight]:
        with SKY.lock:
            return self.flights[: self.flights.index(last) + 1] if last in self.flights else [last]


class Sky:
    """All flights of this process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.channels: set[Channel] = set()
        self.races: list[Race] = []

    def start(self, flight: Flight) -> None:
        """Adds `flight`. The results of earlier flights of its channel that it reads are there afterwards.

        Memory that it shares with a flight of another channel is a race, which its `wait` raises.
        """
        with self.lock:
            others = [(own, channel is flight.channel) for channel in self.channels for own in channel.flights]
        writes = [memory for memory, _ in flight.writes]
        for other, is_ordered in others:
            reads_result = _overlap(flight.reads, [memory for memory, _ in other.writes])
            overwrites = _overlap(writes, [*other.reads, *(memory for memory, _ in other.writes)])
            if not is_ordered and (reads_result or overwrites):
                how = "reads the result of" if reads_result else "writes memory of"
                flight.race = self.report(f"{flight.name} {how} {other.name}, which was not waited for")
            elif reads_result:
                other.land()
            elif overwrites:
                other.is_shared = flight.is_shared = True
        with self.lock:
            self.channels.add(flight.channel)
            flight.channel.flights.append(flight)

    def report(self, text: str) -> Race:
        """Notes a race, which ends the test even if nothing waits for the flight."""
        race = Race(text)
        with self.lock:
            self.races.append(race)
        return race

    def remove(self, flight: Flight) -> None:
        with self.lock:
            if flight in flight.channel.flights:
                flight.channel.flights.remove(flight)
            if not flight.channel.flights:
                self.channels.discard(flight.channel)

    def clear(self) -> list[Race]:
        """Forgets flights that nothing has waited for. Returns the races."""
        with self.lock:
            for channel in self.channels:
                channel.flights.clear()
            self.channels.clear()
            races, self.races = self.races, []
        return races


SKY = Sky()


def _overlap(some: list[Memory], others: list[Memory]) -> bool:
    return any(one.overlaps(other) for one in some for other in others)


class LateGroup(dist.ProcessGroup):
    """The process group of a communicator. inner: moves private copies. of_gpu: accepts no tensor in main memory, like NCCL."""

    def __init__(self, inner: Comm, *, of_gpu: bool = False) -> None:
        super().__init__(inner.rank, inner.size)
        self._inner, self._of_gpu = inner, of_gpu
        self._collectives = Channel()
        self._pairs: dict[int, Channel] = {}
        self._number = inner.rank  # as `rank` of the base class is a method

    def _allgather_base(self, full: Tensor, own: Tensor, opts: Any = None) -> Flight:
        result = _private(full)
        whole, part, place = Memory.of(full), Memory.of(own), Memory.of(result)
        mine = self._number * part.nbytes
        assert part.start == whole.start + mine, "in place"
        writes = [
            (Memory(whole.start + start, end - start), Memory(place.start + start, end - start))
            for start, end in ((0, mine), (mine + part.nbytes, whole.nbytes))
            if end > start
        ]

        def move(sent: list[bytes]) -> list[Any]:
            Memory(place.start + mine, part.nbytes).write(sent[0])
            return [self._inner.all_gather(result, label="late")]

        return self._start("all_gather", full, own, reads=[part], writes=writes, result=result, move=move)

    def _reduce_scatter_base(self, out: Tensor, full: Tensor, opts: Any = None) -> Flight:
        result = _private(out)

        def move(sent: list[bytes]) -> list[Any]:
            source = _filled(full, data=sent[0])
            return [self._inner.reduce_scatter(source, out=result, label="late")]

        return self._start("reduce_scatter", out, full, reads=[Memory.of(full)], result=result, out=out, move=move)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Flight:
        [full] = tensors
        result = _private(full)

        def move(sent: list[bytes]) -> list[Any]:
            Memory.of(result).write(sent[0])
            return [self._inner.all_reduce(result, label="late", in_shard_order=False)]

        return self._start("all_reduce", full, reads=[Memory.of(full)], result=result, out=full, move=move)

    def alltoall_base(
        self, out: Tensor, source: Tensor, receive: Sequence[int], send: Sequence[int], opts: Any = None
    ) -> Flight:
        result = _private(out)

        def move(sent: list[bytes]) -> list[Any]:
            own = _filled(source, data=sent[0])
            if not send:
                return [self._inner.all_to_all(own, out=result, label="late")]
            rows = {"send": list(send), "receive": list(receive)}
            return [self._inner.all_to_all_rows(own.view(-1, 1), out=result.view(-1, 1), label="late", **rows)]

        return self._start("all_to_all", out, source, reads=[Memory.of(source)], result=result, out=out, move=move)

    # Their names since torch 2.13.
    all_gather_single, reduce_scatter_single, all_to_all_single = _allgather_base, _reduce_scatter_base, alltoall_base

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Flight:
        [tensor], source = tensors, opts.rootRank
        result, sends = _private(tensor), source == self._number

        def move(sent: list[bytes]) -> list[Any]:
            if sends:
                Memory.of(result).write(sent[0])
            return [self._inner.broadcast(result, source=source, label="late")]

        reads, out = ([Memory.of(tensor)], None) if sends else ([], tensor)
        return self._start("broadcast", tensor, reads=reads, result=result, out=out, move=move)

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Flight:
        return self._message(tensors[0], peer=to, sends=True)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Flight:
        return self._message(tensors[0], peer=source, sends=False)

    def _message(self, tensor: Tensor, *, peer: int, sends: bool) -> Flight:
        """A message, before which both ranks compare its description: number among the pair's messages, direction, bytes."""
        channel = self._pairs.setdefault(peer, Channel())
        if channel.thread is None:
            channel.thread = SerialThread(name=f"late-{peer}")
        channel.issued += 1
        result = _private(tensor)
        own, inner = torch.tensor([channel.issued, sends, tensor.nbytes]), self._inner

        def exchange() -> None:
            if channel.is_broken:
                raise Race(f"message {own.tolist()} to or from rank {peer} follows one in another order")
            theirs = torch.empty_like(own)
            told = inner.send(own, to=peer, label="order")
            inner.recv(theirs, source=peer, label="order").wait()
            told.wait()
            if theirs.tolist() != [int(own[0]), not sends, int(own[2])]:
                channel.is_broken = True
                raise SKY.report(f"message {own.tolist()} of rank {inner.rank} meets {theirs.tolist()} of rank {peer}")
            (
                inner.send(result, to=peer, label="late") if sends else inner.recv(result, source=peer, label="late")
            ).wait()

        def move(sent: list[bytes]) -> list[Any]:
            if sends:
                Memory.of(result).write(sent[0])
            assert channel.thread is not None
            return [Work(channel.thread.submit(exchange), counters=CommCounters())]

        kind, reads = ("send", [Memory.of(tensor)]) if sends else ("recv", [])
        out = None if sends else tensor
        return self._start(kind, tensor, reads=reads, result=result, out=out, move=move, channel=channel)

    def _start(
        self,
        kind: str,
        *tensors: Tensor,
        reads: list[Memory],
        result: Tensor,
        move: Callable[[list[bytes]], list[Any]],
        writes: list[tuple[Memory, Memory]] | None = None,
        out: Tensor | None = None,
        channel: Channel | None = None,
    ) -> Flight:
        """writes: by default all of `out`, if given. move: starts the inner collective with the contents of `reads`."""
        assert not self._of_gpu or all(tensor.is_cuda for tensor in tensors), (
            f"{kind}: NCCL moves no memory of the host"
        )
        flight = Flight(
            name=f"{kind} of {tensors[0].numel()} x {tensors[0].dtype}",
            channel=channel or self._collectives,
            reads=reads,
            writes=([(Memory.of(out), Memory.of(result))] if out is not None else []) if writes is None else writes,
            held=(*tensors, result),
        )
        SKY.start(flight)
        sent = [memory.read() for memory in reads]
        for memory, _ in flight.writes:
            memory.poison()
        flight.expected = [memory.read() for memory in reads]
        with _disable_current_modes():
            flight.works = move(sent)
        return flight


def _private(like: Tensor) -> Tensor:
    """A flat tensor of the CPU with the size and dtype of `like`, to which threads without inference mode may write."""
    with torch.inference_mode(False), _disable_current_modes():
        return torch.empty(like.numel(), dtype=like.dtype)


def _filled(like: Tensor, *, data: bytes) -> Tensor:
    made = _private(like)
    Memory.of(made).write(data)
    return made


class LateTransport(NcclTransport):
    """NCCL's transport over a `LateGroup` of the ranks of `inner`, which it closes."""

    def __init__(self, inner: Comm, *, of_gpu: bool) -> None:
        super().__init__(group=LateGroup(inner, of_gpu=of_gpu))
        self._inner = inner

    def close(self) -> None:
        self._inner.close()


def late_comm(inner: Comm, *, device: torch.device = CPU) -> Comm:
    """Communicator of NCCL on `device` for the ranks of `inner`. A GPU's has a watchdog, as in `connect`."""
    if inner.size == 1:
        return Comm(SingleRankTransport(), rank=0, size=1, device=device)
    of_gpu, watchdog = device.type == "cuda", None
    if of_gpu:
        options = {"number": next(_connected), "ranks": range(inner.size), "patience": 60.0, "ends_process": False}
        watchdog = Watchdog(dist.distributed_c10d._get_default_store(), rank=inner.rank, **options)
    transport = LateTransport(inner, of_gpu=of_gpu)
    return Comm(transport, rank=inner.rank, size=inner.size, device=device, watchdog=watchdog)


class LateProcess(Process):
    """A rank whose communicators are all late."""

    __slots__ = ()

    def connect(self, groups: Sequence[Sequence[int]]) -> Comm:
        options = {"local_world_size": self.local_world_size, "timeout_seconds": self.timeout_seconds}
        inner = connect_groups(groups, device=CPU, **options)
        inner.before = delay
        return late_comm(inner, device=self.device)


def delay(label: str) -> None:
    """Called on the thread of a collective before it starts."""
    if random.random() < DELAYED:
        time.sleep(random.uniform(0, DELAY_SECONDS))


@contextmanager
def late(process: Process, *, device: torch.device = CPU) -> Iterator[LateProcess]:
    """`process` as a rank over NCCL."""
    comm = late_comm(process.comm, device=device)
    values = {name: getattr(process, name) for name in Process.__slots__}
    made = LateProcess(**values | {"comm": comm, "mesh": all_replicas(comm), "device": device})
    with _delayed(process.comm):
        yield made


@contextmanager
def _delayed(comm: Comm) -> Iterator[None]:
    before, comm.before = comm.before, delay
    try:
        yield
    finally:
        comm.before = before
        races = SKY.clear()
    if races:
        raise races[0]


class LateRanks:
    """A pool of ranks over NCCL."""

    def __init__(self, pool: RankPool) -> None:
        self._pool = pool
        self.world_size = pool.world_size

    def run(self, function: Callable, **kwargs: Any) -> list:
        """As `RankPool.run`."""
        return self._pool.run(_run_late, called=function, given=kwargs)

    def close(self) -> None:
        self._pool.close()


_made: dict[int, tuple[Process, LateProcess]] = {}  # one for each process, so that tests may keep its connections


def _run_late(process: Process, *, called: Callable, given: dict[str, Any]) -> Any:
    if id(process) not in _made:
        with late(process) as own:
            _made[id(process)] = process, own
    with _delayed(process.comm):
        return called(_made[id(process)][1], **given)
