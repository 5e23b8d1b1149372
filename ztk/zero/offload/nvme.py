"""The disk tier: shards are stored in one file per rank, and main memory holds a fixed pool of buffers, for any model size.

One fetched slot occupies one buffer from `fetch` until `release`, or until the write that `put` started has ended. The
update of slot k therefore overlaps with the read of k+1 and the write of k-1 as soon as the pool has buffers for all
three (ZeRO-Infinity, https://arxiv.org/abs/2104.07857, section 5.2.2).
"""

# [Note: Order of transfers]
# Reads of a slot wait for the write submitted before them; a write waits for the write and all reads submitted before
# it. Nothing else is ordered. A transfer that waits holds no thread, so no order of calls can block the threads.
#
# [Note: When the pool runs out]
# A fetch without a free buffer is queued and starts when a buffer is returned; fetches start in the order of the calls.
# Buffers return by themselves from running writes (and from reads released before they ended). When no buffer is about
# to return, only the caller could return one: then `wait()` on a queued fetch raises PoolExhausted.
# `put` of other tensors and `fetch_into` need no buffer: they pass through the staging block of their thread.
#
# [Note: Slots that stay in memory]
# A gradient is written by the backward and read once by the update. Values of slots allocated with `keep` stay in the pool,
# if there is room, until `forget`. That saves 4 of the 34 bytes per parameter that a step moves, and the first update finds its
# gradient at once. Such slots use up to half of the pool beyond the three buffers; the rest, and two of the three, are for prefetched
# states. Their transfers are copies by the same threads, in the same order.

import ctypes
import errno
import math
import os
import uuid
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ztk.core.policies.offload import MIN_BUFFER_COUNT, PAGE_BYTES, OffloadPolicy
from ztk.core.runtime.io import Direction, IoCounters
from ztk.core.runtime.memory import MemoryLedger, Tier
from ztk.core.runtime.pending import Handle
from ztk.core.runtime.planned import place_of
from ztk.core.runtime.streams import has_streams
from ztk.zero.offload.disk import DiskFile
from ztk.zero.offload.io_engine import IoEngine, Transfer, Urgency
from ztk.zero.offload.pool import AlignedPool, AlignedRegion, Lease
from ztk.zero.offload.probe import filesystem_of, probe_folder
from ztk.zero.offload.slot import StoredSlot, check_fits, flat_bytes


class PoolExhausted(RuntimeError):
    """Fetched slots fill all buffers, so one more fetch can never start."""


@dataclass(slots=True, eq=False, kw_only=True)
class NvmeSlot(StoredSlot):
    """A tensor's place in the file, and its running transfers (guarded by the store's lock)."""

    offset: int  # in the file, a multiple of PAGE_BYTES
    padded_bytes: int  # in the file, a multiple of PAGE_BYTES
    fetched: "_Fetch | None" = None  # from fetch() to put() or release()
    write: Transfer | None = None  # the last one submitted, kept when done: later reads raise its error
    reads: list[Transfer] = field(default_factory=list)  # submitted since `write`
    keep: bool = False  # stays in memory from put() to forget(), if there is room
    kept: Lease | None = None  # that memory, used instead of its place in the file


class NvmeStore:
    """Store (see `ztk.core.runtime.store`) over one preallocated, unlinked file; safe to call from several threads.

    Guarantees:
    * Slots read as zeros until the first `put`. Transfers of one slot happen in the order of the calls.
    * Main memory: `policy.pool_bytes`, booked in the ledger as host category "buffers"; nothing is allocated later.
    * `fetch` twice without `put` or `release` between returns the same pending; `release` may be called at any time.
    * `put` of the fetched tensor writes straight from its buffer, which must not be touched any more. Any other value
      must stay unchanged until `wait()` or `flush()` returns.
    * The first failed write is raised by its `wait()`, by every later read of that slot and by every later `flush()`.
    """

    tier = Tier.nvme

    def __init__(
        self,
        policy: OffloadPolicy,
        *,
        rank: int,
        ledger: MemoryLedger,
        counters: IoCounters,
        open_disk: Callable[..., DiskFile] = DiskFile,
    ) -> None:
        """Probes the folder, opens the file, maps the pool and starts the threads.

        open_disk: called with (path, direct=bool); tests pass a DiskFile that is slow or fails.
        Raises ValueError naming offload.nvme_path and the fix if the folder cannot serve.
        """
        self._policy = policy
        self._ledger = ledger
        self._folder = Path(policy.nvme_path)
        self._disk = self._open(rank=rank, open_disk=open_disk)
        self._pool = AlignedPool(
            num_buffers=MIN_BUFFER_COUNT,
            buffer_bytes=policy.buffer_bytes,
            rest_bytes=(policy.buffer_count - MIN_BUFFER_COUNT) * policy.buffer_bytes,
            num_staging=policy.threads,
            staging_bytes=policy.staging_bytes,
            new_region=self._region,
        )
        ledger.add(tier=Tier.host, category="buffers", nbytes=self._pool.nbytes)
        self._engine = self._start_engine(counters)
        self._changed = self._engine.changed  # the one lock of engine and store
        self._slots: list[NvmeSlot] = []
        self._file_bytes = 0  # allocated to slots
        self._reserved_bytes = 0  # of the file on the disk
        self._queued: deque[_Fetch] = deque()  # fetches without a buffer
        self._most_kept = (policy.buffer_count - MIN_BUFFER_COUNT) * policy.buffer_bytes // 2  # bytes
        self._wanted_kept = self._kept = 0  # bytes: of the slots with `keep`, and of those that are kept now
        self._num_returning = 0  # buffers that will return without an action of the caller
        self._closed = False
        # A store that is dropped without `close`, with its engine in a notebook, frees its threads, memory and disk space.
        self._drop = weakref.finalize(self, _drop, self._engine, self._pool)
        # pyrefly: ignore[missing-attribute]  # a property, which typeshed leaves out of __slots__
        self._drop.atexit = False

    # The medium, overridden in plans (`ztk.zero.offload.planned`) #

    def _open(self, *, rank: int, open_disk: Callable[..., DiskFile]) -> DiskFile:
        probe_folder(self._folder, direct=self._policy.direct_io)
        return open_disk(self._folder / f"ztk-rank{rank}-{uuid.uuid4().hex}.bin", direct=self._policy.direct_io)

    def _region(self, nbytes: int) -> AlignedRegion:
        return AlignedRegion(nbytes=nbytes, pin=self._policy.pin_memory and torch.cuda.is_initialized())

    def _start_engine(self, counters: IoCounters) -> IoEngine:
        return IoEngine(
            self._disk, staging=self._pool.staging, block_bytes=self._policy.staging_bytes, counters=counters
        )

    # Space #

    def reserve(self, *, nbytes: int) -> None:
        """Makes the file at least `nbytes` long, so that a full disk is detected before the first slot is written.

        Raises ValueError with the required and available space and the key to change.
        """
        with self._changed:
            missing = nbytes - self._reserved_bytes
            if missing <= 0:
                return
            try:
                self._disk.preallocate(offset=self._reserved_bytes, nbytes=missing)
            except OSError as error:
                raise self._full(nbytes, error) from error
            self._reserved_bytes = nbytes

    def allocate(
        self, *, name: str, shape: tuple[int, ...], dtype: torch.dtype, category: str, keep: bool = False
    ) -> NvmeSlot:
        """A zero-filled slot, padded to 4096 bytes. keep: see [Note: Slots that stay in memory]. Raises ValueError if the disk is full."""
        padded = -(-math.prod(shape) * dtype.itemsize // PAGE_BYTES) * PAGE_BYTES
        with self._changed:
            assert not self._closed, "the store is closed"
            self.reserve(nbytes=self._file_bytes + padded)
            slot = NvmeSlot(
                name=name,
                shape=tuple(shape),
                dtype=dtype,
                category=category,
                offset=self._file_bytes,
                padded_bytes=padded,
                keep=keep,
            )
            self._wanted_kept += padded if keep else 0
            self._file_bytes += padded
            self._slots.append(slot)
        self._ledger.add(tier=self.tier, category=category, nbytes=padded)
        return slot

    # Transfers #

    def fetch(self, slot: NvmeSlot) -> "_Fetch":
        """Starts to read into a buffer. `wait()` returns it as a CPU tensor of the slot's shape, pinned if there is a GPU.

        Raises ValueError for a slot larger than a buffer; `wait()` may raise PoolExhausted or DiskError.
        """
        if slot.padded_bytes > self._policy.buffer_bytes:
            raise ValueError(
                f"offload.buffer_bytes={self._policy.buffer_bytes} is less than the {slot.padded_bytes} bytes of "
                f"{slot.name!r}; set offload.buffer_bytes={slot.padded_bytes} or more"
            )
        with self._changed:
            if slot.fetched is None:
                slot.fetched = self._new_fetch(slot)
                if slot.kept is not None:
                    slot.fetched.transfer.padded_bytes = 0  # there is nothing to move
                    self._start_fetch(slot.fetched, lease=slot.kept)
                else:
                    self._queued.append(slot.fetched)
                    self._serve_queued()
            return slot.fetched

    def has_room(self, slot: NvmeSlot) -> bool:
        """Whether a fetch would get memory now without taking buffers that queued fetches wait for."""
        with self._changed:
            return slot.fetched is not None or (
                not self._queued and self._pool.has_room(slot.padded_bytes, leaving=self._room_to_keep)
            )

    def fetch_ahead(self, slot: NvmeSlot) -> "_Fetch | None":
        """Fetches a slot like `fetch` without `keep`, long before its use. Returns None unless memory is free beyond kept slots and one buffer.

        That buffer keeps later fetches going, in the order in which slots are updated: the first gradient can be fetched into it.
        """
        with self._changed:
            if slot.fetched is None:
                spare = None if self._queued else self._pool.take_spare(slot.padded_bytes, leaving=self._room_to_keep)
                if spare is None:
                    return None
                slot.fetched = self._new_fetch(slot)
                self._start_fetch(slot.fetched, lease=spare)
            return slot.fetched

    def fetch_into(self, slot: NvmeSlot, *, out: Tensor) -> Handle:
        """Reads a slot of any size into `out` (contiguous, on any device), which must not be used before `wait()`.

        Raises ValueError if `out` does not fit; `wait()` may raise DiskError.
        """
        check_fits(out, slot=slot, argument="out")
        with self._changed:
            transfer = self._transfer(slot, direction=Direction.read, urgency=Urgency.awaited, memory=flat_bytes(out))
            if not self._read_from_memory(slot, transfer):
                self._submit_read(slot, transfer)
        return Handle(out, finish=partial(self.wait_for, transfer))

    def put(self, slot: NvmeSlot, *, value: Tensor) -> Handle:
        """Starts to write `value`: the fetched tensor, whose buffer returns to the pool, or any other tensor that fits.

        Raises ValueError if `value` does not fit; `wait()` may raise DiskError.
        """
        check_fits(value, slot=slot, argument="value")
        with self._changed:
            fetched, transfer = slot.fetched, self._transfer(slot, direction=Direction.write, urgency=Urgency.write)
            if fetched is not None and fetched.is_value(value):
                slot.fetched = None
                transfer.memory = fetched.memory
                if slot.kept is not None:
                    transfer.padded_bytes = 0  # the value is in place already
                else:
                    transfer.on_done = self._returns(fetched.buffer)
            else:
                self.release(slot)
                transfer.memory = flat_bytes(value)
                if slot.keep and slot.kept is None and 0 < slot.padded_bytes <= self._room_to_keep:
                    slot.kept = self._pool.take_range(slot.padded_bytes)
                    self._kept += 0 if slot.kept is None else slot.padded_bytes
                if slot.kept is not None:
                    transfer.kept, transfer.urgency = self._pool.memory(slot.kept), Urgency.awaited
            self._submit_write(slot, transfer)
        return Handle(value, finish=partial(self.wait_for, transfer))

    def forget(self, slot: NvmeSlot) -> None:
        """Drops the stored value: memory that kept it returns to the pool, and the slot's content is undefined until the next `put`."""
        with self._changed:
            self.release(slot)
            lease, slot.kept = slot.kept, None
            if lease is None:
                return
            self._kept -= slot.padded_bytes
            last = self._transfer(
                slot, direction=Direction.write, urgency=Urgency.write, memory=self._pool.memory(lease)
            )
            last.padded_bytes, last.on_done = 0, self._returns(lease)
            self._submit_write(slot, last)

    def release(self, slot: NvmeSlot) -> None:
        """Frees fetched memory, which must be unchanged, without writing it. Does nothing if the slot is not fetched."""
        with self._changed:
            fetched, slot.fetched = slot.fetched, None
            if fetched is None or slot.kept is not None:
                return
            if fetched.buffer is None:
                self._queued.remove(fetched)
                self._engine.abandon(fetched.transfer, reason=f"{slot.name!r} was released before it was read")
            elif fetched.transfer.done:
                self._pool.give(fetched.buffer)
                self._serve_queued()
            else:
                fetched.transfer.on_done = self._returns(fetched.buffer)

    def flush(self) -> None:
        """Returns when the disk has accepted all writes. Raises the first error of any write."""
        self._engine.flush()

    def close(self) -> None:
        """Drops running transfers and ends threads, file and pool. Raises no I/O errors. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._drop.detach()
        with self._changed:
            for fetched in self._queued:
                self._engine.abandon(fetched.transfer, reason="the store was closed before this slot was read")
            self._queued.clear()
        self._engine.close()
        self._disk.close()
        self._pool.close()
        self._ledger.remove(tier=Tier.host, category="buffers", nbytes=self._pool.nbytes)
        for slot in self._slots:
            self._ledger.remove(tier=self.tier, category=slot.category, nbytes=slot.padded_bytes)

    # Utilities; all but `wait_for` are called with the lock held #

    def wait_for(self, transfer: Transfer) -> None:
        """Returns when `transfer` has ended. Raises its error, or PoolExhausted if it can never end."""
        with self._changed:
            self._engine.hasten(transfer)
            while not transfer.done:
                if self._is_stuck(transfer):
                    raise PoolExhausted(
                        f"fetched slots fill the pool's {self._policy.buffer_count} buffers and none is being written, so "
                        "this fetch would wait forever: put() or release() a slot first, or raise offload.buffer_count"
                    )
                self._changed.wait()
            if transfer.error is not None:
                raise transfer.error

    def _is_stuck(self, transfer: Transfer) -> bool:
        return self._num_returning == 0 and any(fetched.transfer is transfer for fetched in self._queued)

    def _transfer(
        self, slot: NvmeSlot, *, direction: Direction, urgency: Urgency, memory: Tensor | None = None
    ) -> Transfer:
        return Transfer(
            direction=direction,
            urgency=urgency,
            offset=slot.offset,
            nbytes=slot.nbytes,
            padded_bytes=slot.padded_bytes,
            memory=memory,
        )

    def _read_from_memory(self, slot: NvmeSlot, transfer: Transfer) -> bool:
        """Copies a slot that is kept in memory, or whose write has not ended, from there. No disk read."""
        source, out = None if slot.write is None else slot.write.memory, transfer.memory
        if slot.kept is not None:
            transfer.kept = self._pool.memory(slot.kept)
            source = transfer.kept if source is None else source
        failed = slot.write is not None and slot.write.error is not None
        if source is None or failed:
            return False
        assert out is not None, "a fetch from memory has a target"
        if has_streams(source) or has_streams(out):
            return False
        if not source.is_meta:
            ctypes.memmove(out.data_ptr(), source.data_ptr(), transfer.nbytes)  # the lock keeps the write from ending
        transfer.memory, transfer.done = None, True
        return True

    def _submit_write(self, slot: NvmeSlot, transfer: Transfer) -> None:
        before = [*slot.reads, *([slot.write] if slot.write is not None else [])]
        slot.write, slot.reads = transfer, []
        self._engine.submit(transfer, after=before)

    def _submit_read(self, slot: NvmeSlot, transfer: Transfer) -> None:
        slot.reads = [read for read in slot.reads if not read.done]
        before = [slot.write] if slot.write is not None else []
        if slot.kept is not None:  # a fetch hands out memory that earlier reads may still copy from
            before += slot.reads
        slot.reads.append(transfer)
        self._engine.submit(transfer, after=before)

    def _serve_queued(self) -> None:
        while self._queued and (lease := self._pool.take(self._queued[0].slot.padded_bytes)) is not None:
            self._start_fetch(self._queued.popleft(), lease=lease)

    def _new_fetch(self, slot: NvmeSlot) -> "_Fetch":
        transfer = self._transfer(slot, direction=Direction.read, urgency=Urgency.ahead)
        return _Fetch(store=self, slot=slot, transfer=transfer)

    def _start_fetch(self, fetched: "_Fetch", *, lease: Lease) -> None:
        fetched.buffer = lease
        fetched.memory = self._pool.memory(lease)[: fetched.slot.padded_bytes]
        fetched.transfer.memory = fetched.memory
        self._submit_read(fetched.slot, fetched.transfer)

    @property
    def _room_to_keep(self) -> int:
        """Bytes of the pool that slots with `keep` may still take."""
        return min(self._most_kept, self._wanted_kept) - self._kept

    def _returns(self, buffer: Lease) -> Callable[[], None]:
        """Counts a buffer as about to return. Returns the callback for the end of the transfer that still uses it."""
        self._num_returning += 1

        def give_back() -> None:
            self._num_returning -= 1
            self._pool.give(buffer)
            if not self._closed:
                self._serve_queued()

        return give_back

    def _full(self, nbytes: int, error: OSError) -> ValueError:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            reason = os.strerror(error.errno)
            return ValueError(f"offload.nvme_path={self._folder}: reserving {nbytes} bytes failed ({reason})")
        free = filesystem_of(self._folder).free_bytes
        return ValueError(
            f"offload.nvme_path={self._folder} has too little space: this rank needs {_gib(nbytes)}, of which "
            f"{_gib(nbytes - self._reserved_bytes)} are not yet reserved, and {_gib(free)} are free "
            f"({os.strerror(error.errno)}); free some, or set offload.nvme_path to a folder on a larger disk"
        )


class _Fetch:
    """The handle of a `fetch`, and the buffer that the slot occupies."""

    def __init__(self, *, store: NvmeStore, slot: NvmeSlot, transfer: Transfer) -> None:
        self._store = store
        self.slot = slot
        self.transfer = transfer
        self.buffer: Lease | None = None  # of the pool; None while queued
        self.memory: Tensor | None = None  # uint8 [slot.padded_bytes] of that buffer

    def wait(self) -> Tensor:
        """The slot's tensor, when it is in memory. Raises DiskError, PoolExhausted or StoreClosed."""
        self._store.wait_for(self.transfer)
        slot = self.slot
        return self.memory[: slot.nbytes].view(slot.dtype).view(slot.shape)

    def is_value(self, value: Tensor) -> bool:
        """Whether `value` is the fetched tensor, or a reshape of it."""
        if (
            not self.transfer.done or self.memory is None or value.device != self.memory.device
        ):  # None while it is queued
            return False
        return place_of(value) == place_of(self.memory)


def _drop(engine: IoEngine, pool: AlignedPool) -> None:
    """Ends threads and pool. The file is closed when the last thread has dropped it."""
    engine.stop()
    pool.close()


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
