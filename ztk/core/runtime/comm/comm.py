"""Collectives with handles and counters.

Blocking transports run on one thread per process, in the order of submission. The order is the same on all ranks because all ranks run
the same program. So communication overlaps with compute, and no rank can overtake another. Point-to-point messages have their own
threads. Results have the dtype of the tensor that was sent.
"""

import ctypes
import functools
import pickle
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as futures_wait
from typing import Any

import torch
from torch import Tensor

from ztk.core.runtime.comm.counters import CommCounters
from ztk.core.runtime.comm.transport import Transport
from ztk.core.runtime.comm.watchdog import Entered, Watchdog
from ztk.core.runtime.dispatch_modes import refuse_tracing
from ztk.core.runtime.pending import Handle
from ztk.core.runtime.planned import note_read
from ztk.core.runtime.ranges import named
from ztk.core.runtime.serial import SerialThread
from ztk.core.runtime.streams import Aside, current_event, is_capturing

INLINE_BYTES = 1 << 13  # of an object in one broadcast; a larger one takes a second


class Work:
    """A collective in flight. After `wait()` its result may be used (on a GPU: by the current stream).

    pending: a future, an object with `wait()`, a function that starts the collective, or None if the collective is complete.
    """

    def __init__(
        self,
        pending: Any,
        *,
        counters: CommCounters,
        watchdog: Watchdog | None = None,
    ) -> None:
        self._pending = pending
        self._counters = counters
        self._watchdog = watchdog

    @property
    def is_done(self) -> bool:
        """`wait()` would return, or raise, at once."""
        match self._pending:
            case None:
                return True
            case Future():
                return self._pending.done()
            case _:
                return not callable(self._pending) and self._pending.is_completed()

    def wait(self) -> None:
        """Waits for the result and raises the error of the collective, if there was one. Idempotent."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        start = time.perf_counter()
        try:
            if callable(pending):
                pending = pending()
            if isinstance(pending, Future):
                self._result(pending)
            elif pending is not None:
                pending.wait()
        finally:
            self._counters.wait_seconds += time.perf_counter() - start

    def _result(self, future: Future) -> None:
        """Waits for `future`. A thread inside a collective cannot be interrupted, but this wait can."""
        while self._watchdog is not None and not futures_wait([future], timeout=1.0).done:
            if self._watchdog.mismatch is not None:
                raise self._watchdog.mismatch
        future.result()


class _Watched:
    """A device collective that the watchdog can follow without keeping its tensors alive.

    NCCL's work object holds its tensors until it is dropped, even after the current stream has waited. `BufferPool` counts references to
    detect views, and the host runs many collectives ahead of the device, so all of their buffers would appear to be in use.
    """

    def __init__(self, work: Any, *, entered: Entered, watchdog: Watchdog, device: torch.device) -> None:
        """work: the object that a non-blocking transport returned. entered: the entry from `Watchdog.enter`."""
        self._work, self._device = work, device
        self._leave = functools.partial(watchdog.leave, entered)
        self._leave(is_over=work.is_completed)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        self._work.wait()
        self._leave(
            is_over=current_event(self._device).query
        )  # the current stream runs after the collective from here on


class Comm:
    """Counted collectives on flat contiguous tensors among `size` ranks.

    `before` is called with the label before each collective; tests use it to delay or kill a rank.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        rank: int,
        size: int,
        device: torch.device,
        watchdog: Watchdog | None = None,
    ) -> None:
        """watchdog: required by transports that do not compare labels themselves."""
        self.rank, self.size, self.device = rank, size, device
        self.counters = CommCounters()
        self.before: Callable[[str], None] | None = None
        self._transport, self._watchdog = transport, watchdog
        self._thread = (
            SerialThread(name="ztk-comm", interrupt=transport.close) if size > 1 and transport.blocking else None
        )
        self._message_threads: dict[str, SerialThread] = {}

    def empty(self, numel: int, *, dtype: torch.dtype, label: str) -> Tensor:
        """Allocates a long-lived buffer [numel] with undefined content. A collective call; waits.

        On the CPUs of one machine the buffer is in shared memory, so collectives on the whole buffer need no copies.
        """
        made = None
        if self._thread is not None:  # `empty` is a collective, so it must run in submission order
            name = f"memory {label} {numel} x {str(dtype)[6:]}"
            made = self._thread.submit(lambda: self._transport.empty(numel, dtype=dtype, label=name)).result()
        return torch.empty(numel, dtype=dtype, device=self.device) if made is None else made

    def all_gather(self, full: Tensor, *, label: str, after: Handle | None = None) -> Work:
        """Gathers in place: every rank's slice of `full` [size * n] reaches every rank. Runs `after.wait()` first, if given.

        after: a handle that must complete before the collective starts. Without a communication thread (one rank, or NCCL), a collective
        with a dependency starts in its own `wait()`, which every rank calls at the same place of the program, or at once if `after` is
        immediate. On a GPU it then follows the work before this call, and runs next to later work (`streams.Aside`).
        """
        self._check(full)
        self.counters.count("all_gather", numel=full.numel(), itemsize=full.itemsize)
        return self._submit(f"all_gather {label}", full, lambda t, name: t.all_gather(full, label=name), after=after)

    def gather(self, x: Tensor, *, label: str) -> Tensor:
        """`x` of every rank, in rank order: [size, *x.shape], without a gradient. Waits."""
        parts = x.new_empty(self.size, *x.shape)
        parts[self.rank].copy_(x.detach())
        self.all_gather(parts.view(-1), label=label).wait()
        return parts

    def reduce_scatter(self, full: Tensor, *, out: Tensor, label: str) -> Work:
        """`out` [n] = the sum over ranks of this rank's slice of `full` [size * n]. `out` may be that slice."""
        self._check(full)
        assert out.numel() * self.size == full.numel() and out.dtype == full.dtype and out.is_contiguous()
        self.counters.count("reduce_scatter", numel=full.numel(), itemsize=full.itemsize)
        return self._submit(
            f"reduce_scatter {label}", full, lambda t, name: t.reduce_scatter(full, out=out, label=name)
        )

    def all_reduce(self, full: Tensor, *, label: str, in_shard_order: bool = True) -> Work:
        """Sums `full` [size * n] over ranks in place, with the same bits on all ranks and the summation order of `reduce_scatter`.

        in_shard_order: if False, NCCL may use the order of its own all-reduce. Use this for sums that no sharded run computes in another
        way.
        """
        self._check(full)
        own = full.chunk(self.size)[self.rank]
        self.counters.count("all_reduce", numel=2 * full.numel(), itemsize=full.itemsize)

        if in_shard_order:
            return self._submit(f"all_reduce {label}", full, lambda t, name: t.all_reduce(full, own=own, label=name))
        return self._submit(f"all_reduce {label}", full, lambda t, name: t.all_sum(full, own=own, label=name))

    def all_to_all(self, source: Tensor, *, out: Tensor, label: str) -> Work:
        """Part r of `source` goes to rank r; `out` receives the parts from all ranks, in rank order."""
        self._check(source)
        self.counters.count("all_to_all", numel=source.numel(), itemsize=source.itemsize)
        return self._submit(f"all_to_all {label}", source, lambda t, name: t.all_to_all(source, out=out, label=name))

    def all_to_all_rows(
        self,
        source: Tensor,
        *,
        out: Tensor,
        send: Sequence[int],
        receive: Sequence[int],
        label: str,
        kind: str = "all_to_all",
    ) -> Work:
        """All-to-all with parts of unequal size: `send[r]` rows of `source` [S, C] go to rank r, and `receive[r]` rows of `out` come from
        it.

        Rank r must receive as many rows as this rank sends to it. Counts may be zero; every rank must make the call nevertheless.
        kind: counter for the rows of `source`.
        """
        assert sum(send) == source.shape[0] and sum(receive) == out.shape[0] and source.shape[1:] == out.shape[1:]
        assert source.is_contiguous() and out.is_contiguous() and source.dtype == out.dtype
        self.counters.count(kind, numel=source.numel(), itemsize=source.itemsize)
        width = source.shape[1]
        sent, received = [rows * width for rows in send], [rows * width for rows in receive]

        def run(transport: Transport, name: str):
            return transport.all_to_all_uneven(
                source.view(-1), out=out.view(-1), send=sent, receive=received, label=name
            )

        return self._submit(
            f"all_to_all {label} rows of", source, run, size=str(width)
        )  # the number of rows differs between ranks

    def pass_on(self, source: Tensor, *, out: Tensor, label: str) -> Work:
        """Shifts around the ring: `source` [n] goes to the next rank, and `out` [n] receives the previous rank's. Every rank makes the
        call."""
        assert source.is_contiguous() and source.dim() == 1 and out.shape == source.shape and out.dtype == source.dtype
        self.counters.count("ring", numel=source.numel(), itemsize=source.itemsize)
        send, receive = [0] * self.size, [0] * self.size
        send[(self.rank + 1) % self.size] = receive[self.rank - 1] = source.numel()

        def run(transport: Transport, name: str):
            return transport.all_to_all_uneven(source, out=out, send=send, receive=receive, label=name)

        return self._submit(f"ring {label}", source, run)

    def broadcast(self, tensor: Tensor, *, source: int, label: str, kind: str = "broadcast") -> Work:
        """`tensor` of rank `source` reaches every rank. kind: counter."""
        assert tensor.is_contiguous()
        self.counters.count(kind, numel=tensor.numel(), itemsize=tensor.itemsize)
        flat = tensor.view(-1)
        return self._submit(f"broadcast {label}", tensor, lambda t, name: t.broadcast(flat, source=source, label=name))

    def send(self, tensor: Tensor, *, to: int, label: str, kind: str = "send") -> Work:
        """Sends the bytes of `tensor` (contiguous, any dtype) to rank `to`, which calls `recv` with the same size and label.

        Messages to one rank arrive in the order of the calls. They may overtake collectives and messages to other ranks. `tensor` is kept
        alive and must not change before `wait()` returns. kind: counter for the message, at the sender only.
        """
        self.counters.count(kind, numel=tensor.numel(), itemsize=tensor.itemsize)
        return self._pass(
            f"send {to}", label, lambda: self._transport.send(tensor.detach().view(-1), to=to, label=label)
        )

    def recv(self, out: Tensor, *, source: int, label: str) -> Work:
        """Fills `out` with the next message of rank `source`."""
        return self._pass(
            f"recv {source}", label, lambda: self._transport.recv(out.view(-1), source=source, label=label)
        )

    def gather_scalars(self, values: Tensor, *, label: str) -> Tensor:
        """Gathers a few numbers [k] of every rank into [size, k], the same bits on all ranks. Waits."""
        full = values.new_empty(self.size, *values.shape)
        full[self.rank] = values
        self.counters.count("scalars", numel=full.numel(), itemsize=full.itemsize)
        self._submit(f"scalars {label}", full, lambda t, name: t.all_gather(full.view(-1), label=name)).wait()
        return full

    def any(self, flag: bool, *, label: str) -> bool:
        """Whether `flag` is set on any rank. For communicators in host memory. Waits."""
        return bool(self.maximum(float(flag), label=label))

    def maximum(self, number: float, *, label: str) -> float:
        """The largest `number` of all ranks, none of which is negative, as fp32. For communicators in host memory. Waits."""
        rows = torch.zeros(self.size)
        own = rows[self.rank : self.rank + 1].fill_(number)
        self.counters.count("scalars", numel=1, itemsize=own.itemsize)
        self._submit(f"scalars {label}", rows, lambda t, name: t.maximum(rows, own=own, label=name)).wait()
        return own.item()

    def gather_numbers(
        self, numbers: Sequence[float], *, label: str, dtype: torch.dtype = torch.float32
    ) -> list[list[float]]:
        """A few numbers of every rank, in rank order, on all ranks and on the host, rounded to `dtype`. Waits."""
        note_read(f"numbers of ranks: {label}")
        values = torch.tensor(numbers, dtype=dtype, device=self.device)
        return self.gather_scalars(values, label=label).tolist()

    def gather_objects(self, obj: object) -> list:
        """Every rank's `obj` (small, picklable) in rank order, on all ranks. Waits."""
        note_read("objects of ranks")
        data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        size = torch.tensor([data.numel()], device=self.device)
        sizes = self.gather_scalars(size, label="object sizes").flatten().tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        padded[: data.numel()].copy_(data)
        rows = self.gather_scalars(padded, label="objects").cpu()
        return [pickle.loads(ctypes.string_at(row.data_ptr(), size)) for row, size in zip(rows, sizes, strict=True)]

    def broadcast_object(self, obj: object, *, label: str) -> Any:
        """Rank 0's `obj` (picklable) on every rank, by one broadcast if it is small. Other ranks' `obj` is ignored. Waits."""
        note_read("an object of another rank")
        data = pickle.dumps(obj) if self.rank == 0 else b""
        head = len(data).to_bytes(8, "little") + data[: INLINE_BYTES - 8]
        found = self._broadcast_bytes(head, size=INLINE_BYTES, label=label)
        size, inline = int.from_bytes(found[:8], "little"), found[8:]
        return pickle.loads(inline if size <= len(inline) else self._broadcast_bytes(data, size=size, label=label))

    def _broadcast_bytes(self, data: bytes, *, size: int, label: str) -> bytes:
        """`size` bytes, of which rank 0 has the first ones."""
        memory = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8).to(self.device)
        self.broadcast(memory, source=0, label=label, kind="scalars").wait()
        return ctypes.string_at(memory.cpu().data_ptr(), size)

    def collect_objects(self, obj: object, *, label: str) -> list | None:
        """Every rank's `obj` (picklable) in rank order on rank 0, None on the others, which receive nothing. Waits."""
        own = _bytes_of(obj)
        sizes = self._sizes(own, label=label)
        out = torch.empty(sum(sizes) if self.rank == 0 else 0, 1, dtype=torch.uint8)
        send, receive = self._with_first(own.numel()), sizes if self.rank == 0 else [0] * self.size
        self.all_to_all_rows(own, out=out, send=send, receive=receive, label=label, kind="scalars").wait()
        return [_object_of(part) for part in out.split(sizes)] if self.rank == 0 else None

    def distribute_objects(self, objects: Sequence[object] | None, *, label: str) -> Any:
        """This rank's entry of rank 0's `objects` (picklable). Other ranks' `objects` are ignored. Waits."""
        note_read("an object of another rank")
        rows = [_bytes_of(each) for each in objects or () if self.rank == 0]
        sizes = [row.numel() for row in rows]
        nbytes = int(self.broadcast_object(sizes, label=label)[self.rank])
        source = torch.cat(rows) if rows else torch.empty(0, 1, dtype=torch.uint8)
        out = torch.empty(nbytes, 1, dtype=torch.uint8)
        send, receive = sizes or [0] * self.size, self._with_first(nbytes)
        self.all_to_all_rows(source, out=out, send=send, receive=receive, label=label, kind="scalars").wait()
        return _object_of(out)

    def _sizes(self, data: Tensor, *, label: str) -> list[int]:
        note_read("objects of ranks")
        size = torch.tensor([data.numel()], device=self.device)
        return self.gather_scalars(size, label=f"{label} sizes").flatten().tolist()

    def _with_first(self, rows: int) -> list[int]:
        """Rows that this rank exchanges with each rank: all of them with rank 0."""
        return [rows] + [0] * (self.size - 1)

    def send_object(self, obj: object, *, to: int, label: str) -> list[tuple[Work, Tensor]]:
        """Sends `obj` (small, picklable) to rank `to`, which calls `recv_object`. The caller keeps the returned works until they are
        done."""
        data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8).to(self.device)
        size = torch.tensor([data.numel()], device=self.device)
        return [(self.send(tensor, to=to, label=label, kind="scalars"), tensor) for tensor in (size, data)]

    def recv_object(self, *, source: int, label: str) -> Any:
        """Receives the object that rank `source` sends with `send_object`. Waits."""
        note_read("an object of another rank")
        size = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.recv(size, source=source, label=label).wait()
        data = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        self.recv(data, source=source, label=label).wait()
        return pickle.loads(bytes(data.tolist()))

    def barrier(self) -> None:
        """Returns when every rank has arrived."""
        self.gather_scalars(torch.zeros(1, device=self.device), label="barrier")
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Stops the threads and closes the connections. Peers that still wait raise `PeerLost`."""
        for thread in (self._thread, *self._message_threads.values()):
            if thread is not None:
                thread.close()
        self._transport.close()
        if self._watchdog is not None:
            self._watchdog.close()

    def _pass(self, direction: str, label: str, run: Callable) -> Work:
        """Sends or receives one message. Each direction of each pair has its own thread, so no message waits for another pair's."""
        refuse_tracing(f"{direction} {label}")

        def task():
            if self.before is not None:
                self.before(f"{direction.partition(' ')[0]} {label}")
            with named(f"{direction.partition(' ')[0]} {label}"), torch.no_grad():
                return run()

        if not self._transport.blocking or self.size == 1:
            return Work(task(), counters=self.counters)
        if direction not in self._message_threads:
            self._message_threads[direction] = SerialThread(name=f"ztk-{direction}", interrupt=self._transport.close)
        return Work(self._message_threads[direction].submit(task), counters=self.counters)

    def _check(self, full: Tensor) -> None:
        assert full.is_contiguous() and full.dim() == 1 and full.numel() % self.size == 0, (full.shape, self.size)

    def _submit(
        self, label: str, tensor: Tensor, run: Callable, *, size: str | None = None, after: Handle | None = None
    ) -> Work:
        """size: size in the label, equal on all ranks. Defaults to the number of elements."""
        if self.size > 1:
            refuse_tracing(label)
        name = f"{label} {size or tensor.numel()} x {str(tensor.dtype)[6:]}"

        def task():
            if after is not None:
                after.wait()
            if self.before is not None:
                self.before(name)
            watchdog = self._watchdog
            if watchdog is not None and is_capturing(tensor):
                watchdog.pass_over()
                watchdog = None
            entered = None if watchdog is None else watchdog.enter(name)
            pending = self._run(run, name=name)
            if watchdog is None or entered is None:
                return pending
            if pending is not None:
                return _Watched(pending, entered=entered, watchdog=watchdog, device=self.device)
            watchdog.leave(entered)
            return None

        if self._thread is None:
            if after is None:
                return Work(task(), counters=self.counters)
            start = functools.partial(Aside(tensor).run, task)
            return Work(start() if after.is_immediate else start, counters=self.counters)
        return Work(self._thread.submit(task), counters=self.counters, watchdog=self._watchdog)

    def _run(self, run: Callable, *, name: str) -> Any:
        """Starts the collective; on a blocking transport it is complete on return."""
        start = time.perf_counter()
        try:
            # Grad mode is on by default in a thread, and views of inputs may require gradients.
            with named(name), torch.no_grad():
                return run(self._transport, name)
        finally:
            self.counters.busy_seconds += time.perf_counter() - start


def _bytes_of(obj: object) -> Tensor:
    """uint8 [n, 1] in host memory, which the transports of GPUs move over gloo."""
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8).view(-1, 1)


def _object_of(data: Tensor) -> Any:
    return pickle.loads(ctypes.string_at(data.data_ptr(), data.numel()))
