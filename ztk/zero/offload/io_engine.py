"""Threads that move slots between memory and the offload file, a block per system call.

Python threads are enough: preadv, pwritev, memmove and CUDA synchronisation release the interpreter lock, and at 8 MiB
per call a disk of 10 GB/s needs 1200 calls a second.
"""

import atexit
import ctypes
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from torch import Tensor

from ztk.core.policies.offload import PAGE_BYTES
from ztk.core.runtime.io import Direction, IoCounters
from ztk.core.runtime.streams import Event, copy_behind, current_event, has_streams
from ztk.zero.offload.disk import DiskFile

EXIT_SECONDS = 5.0  # wait for running calls in a process that ends without `close`


class Urgency(IntEnum):
    """Priority of transfers. Writes come last, unless a caller waits for them."""

    awaited = (
        0  # reads into the caller's memory (parameters that a forward needs), copies, writes that a caller waits for
    )
    ahead = 1  # reads into the pool
    write = 2


class StoreClosed(RuntimeError):
    """A transfer was abandoned because its slot was released or its store closed."""


@dataclass(slots=True, eq=False, kw_only=True)
class Transfer:
    """The bytes of one slot being moved. The engine's lock guards the fields below `on_done`."""

    direction: Direction
    offset: int  # in the file
    nbytes: int  # payload
    padded_bytes: int  # payload rounded up to pages, the disk traffic
    urgency: Urgency
    memory: Tensor | None = None  # uint8 [>= nbytes], CPU or CUDA; None while a fetch waits for a buffer
    kept: Tensor | None = None  # uint8 [padded_bytes] of host memory that replaces the slot's place in the file
    ready: Event | None = None  # the caller's work on a GPU's `memory` up to the call; copies start after it
    on_done: Callable[[], None] | None = None  # called once with the lock held, also after an error

    blocks_left: int = 0
    num_before: int = 0  # unfinished transfers that must end first
    behind: list["Transfer"] = field(default_factory=list)  # transfers that wait for this one
    done: bool = False
    error: Exception | None = None


class IoEngine:
    """`len(staging)` threads over one file. `changed` is the lock of all bookkeeping, and is notified when transfers end.

    staging: a block of memory for each thread, uint8 [block_bytes] on the CPU.
    """

    def __init__(self, disk: DiskFile, *, staging: list[Tensor], block_bytes: int, counters: IoCounters) -> None:
        self._disk = disk
        self._block_bytes = block_bytes
        self._counters = counters
        lock = threading.RLock()  # reentrant: callbacks may submit
        self.changed = threading.Condition(lock)
        self._work = threading.Condition(lock)
        self._queues: dict[Urgency, deque[tuple[Transfer, int]]] = {
            urgency: deque() for urgency in Urgency
        }  # (transfer, first byte)
        self._unfinished: set[Transfer] = set()
        self._num_writes = 0  # unfinished ones
        self._write_error: Exception | None = None
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, args=(block,), name=f"ztk-io-{i}", daemon=True)
            for i, block in enumerate(staging)
        ]
        for thread in self._threads:
            thread.start()
        _running.add(self)

    # Transfers #

    def submit(self, transfer: Transfer, *, after: Iterable[Transfer]) -> None:
        """Queues `transfer` after the unfinished ones of `after`. A read after a failed write fails with the write's error."""
        with self.changed:
            assert not self._closing, "the store is closed"
            self._unfinished.add(transfer)
            self._num_writes += transfer.direction is Direction.write
            assert transfer.memory is not None, "a transfer keeps its memory until it has ended"
            if has_streams(transfer.memory):
                transfer.ready = current_event(transfer.memory.device)
            for other in after:
                if not other.done:
                    other.behind.append(transfer)
                    transfer.num_before += 1
                else:
                    _inherit_error(transfer, source=other)
            if transfer.num_before == 0:
                self._start(transfer)

    def hasten(self, transfer: Transfer) -> None:
        """Moves the blocks of a write before prefetches, because a caller waits for it. Called with the lock held.

        Without this, a backward waited 99 of 540 ms per step for writes of gradients when the pool had room for many prefetches.
        """
        if transfer.urgency is not Urgency.write:
            return
        transfer.urgency = Urgency.awaited  # also for blocks that are not queued yet
        waiting, queue = [], self._queues[Urgency.write]
        for _ in range(len(queue)):
            block = queue.popleft()
            (waiting if block[0] is transfer else queue).append(block)
        self._queues[Urgency.awaited].extend(waiting)

    def flush(self) -> None:
        """Waits for all writes submitted so far. Raises the first error of any write of this engine."""
        with self.changed:
            while self._num_writes:
                self.changed.wait()
            if self._write_error is not None:
                raise self._write_error
        self._disk.sync()

    def abandon(self, transfer: Transfer, *, reason: str) -> None:
        """Ends a transfer that was never submitted, with StoreClosed."""
        with self.changed:
            transfer.error = StoreClosed(reason)
            transfer.done = True
            self.changed.notify_all()

    def close(self) -> None:
        """Drops queued transfers, waits for running calls and stops the threads. Dropped transfers end with StoreClosed."""
        _running.discard(self)
        self.stop()
        for thread in self._threads:
            thread.join()
        with self.changed:
            for transfer in self._unfinished:
                self.abandon(transfer, reason="the store was closed before this transfer ended")
            self._unfinished.clear()

    def stop(self) -> None:
        """Drops queued transfers; the threads end after their running calls. Does not wait."""
        with self.changed:
            self._closing = True
            for queue in self._queues.values():
                queue.clear()
            self._work.notify_all()

    def end_with_process(self) -> None:
        """Stops, and waits for at most EXIT_SECONDS: a hanging disk must not keep the process alive."""
        self.stop()
        deadline = time.monotonic() + EXIT_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    # Threads #

    def _start(self, transfer: Transfer) -> None:
        starts = range(0, transfer.padded_bytes, self._block_bytes)
        transfer.blocks_left = len(starts)
        if transfer.error is not None or not starts:
            self._finish(transfer)
            return
        self._queues[transfer.urgency].extend((transfer, start) for start in starts)
        self._work.notify(len(starts))

    def _run(self, staging: Tensor) -> None:
        while True:
            with self.changed:
                while not any(self._queues.values()) and not self._closing:
                    self._work.wait()
                if self._closing:
                    return
                transfer, start = next(queue for queue in self._queues.values() if queue).popleft()
                failed = transfer.error is not None
            error = None if failed else self._move_block(transfer, start=start, staging=staging)
            with self.changed:
                transfer.error = transfer.error or error
                transfer.blocks_left -= 1
                if transfer.blocks_left == 0:
                    self._finish(transfer)
            del transfer, error  # an idle thread must not keep the caller's tensor alive

    def _finish(self, transfer: Transfer) -> None:
        transfer.done = True
        transfer.memory = transfer.kept = None
        self._unfinished.discard(transfer)
        if transfer.direction is Direction.write:
            self._num_writes -= 1
            self._write_error = self._write_error or transfer.error
        if transfer.on_done is not None:
            transfer.on_done()
        for other in transfer.behind:
            _inherit_error(other, source=transfer)
            other.num_before -= 1
            if other.num_before == 0:
                self._start(other)
        transfer.behind.clear()
        self.changed.notify_all()

    def _move_block(self, transfer: Transfer, *, start: int, staging: Tensor) -> Exception | None:
        """Moves one block, through `staging` unless the disk can access its memory directly."""
        nbytes = min(self._block_bytes, transfer.padded_bytes - start)
        piece = transfer.memory[start : start + nbytes]  # shorter than nbytes if the slot ends inside a page
        payload = min(nbytes, transfer.nbytes - start)
        staged = has_streams(piece) or piece.numel() < nbytes or piece.data_ptr() % PAGE_BYTES != 0
        buffer = staging[:nbytes] if staged else piece
        offset = transfer.offset + start
        try:
            if transfer.kept is not None:
                kept = transfer.kept[start : start + piece.numel()]
                source, out = (piece, kept) if transfer.direction is Direction.write else (kept, piece)
                _copy(source, out=out, ready=transfer.ready)
            elif transfer.direction is Direction.read:
                with self._counters.moving(Direction.read, nbytes=nbytes, payload_bytes=payload):
                    self._disk.read(buffer, offset=offset)
                if staged:
                    _copy(buffer[: piece.numel()], out=piece, ready=transfer.ready)
            else:
                if staged:
                    _copy(piece, out=buffer[: piece.numel()], ready=transfer.ready)
                with self._counters.moving(Direction.write, nbytes=nbytes, payload_bytes=payload):
                    self._disk.write(buffer, offset=offset)
        except Exception as error:  # noqa: BLE001 - raised in the thread that waits
            return error
        return None


def _inherit_error(transfer: Transfer, *, source: Transfer) -> None:
    """Passes an error on to a later transfer. A read must not return data of a failed write; a write replaces all of it and may run."""
    if transfer.direction is Direction.read and source.direction is Direction.write:
        transfer.error = transfer.error or source.error


def _copy(source: Tensor, *, out: Tensor, ready: Event | None) -> None:
    """Copies equal numbers of bytes between the pool's memory and the caller's; complete on return."""
    if ready is None:  # copy_ would start a team of OpenMP threads in each I/O thread
        ctypes.memmove(out.data_ptr(), source.data_ptr(), source.numel())
        return
    copy_behind(ready, source=source, out=out)


_running: "weakref.WeakSet[IoEngine]" = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    """Stops all engines: a thread inside torch at interpreter exit aborts the process ("terminate called without an active exception")."""
    for engine in list(_running):
        engine.end_with_process()
