"""Storage for copies of a preempted sequence's blocks: main memory, or a file that is written with direct I/O."""

import uuid
import weakref
from pathlib import Path

import torch
from torch import Tensor

from ztk.core.policies.offload import PAGE_BYTES, OffloadPolicy
from ztk.core.runtime.io import Direction, IoCounters
from ztk.zero.offload.disk import DiskFile
from ztk.zero.offload.io_engine import IoEngine, Transfer, Urgency
from ztk.zero.offload.pool import AlignedRegion
from ztk.zero.offload.probe import probe_folder

_AT_ONCE = 8  # blocks that are under way together, in memory of the file's own


class MainMemory:
    """Keeps copies of blocks, uint8 [bytes] each; page-locked where blocks are on a GPU, so that the host does not wait for them."""

    def write(self, blocks: list[Tensor]) -> list[Tensor]:
        """A handle for each copy."""
        copies = [torch.empty(one.shape, dtype=one.dtype, pin_memory=one.device.type == "cuda") for one in blocks]
        return [copy.copy_(one, non_blocking=True) for copy, one in zip(copies, blocks, strict=True)]

    def read(self, handles: list[Tensor], *, into: list[Tensor]) -> None:
        """Copies back, uint8 [bytes] each; the copies stay valid."""
        for copy, target in zip(handles, into, strict=True):
            target.copy_(copy, non_blocking=True)

    def free(self, handles: list[Tensor]) -> None:
        """Memory is freed with its last tensor."""

    def close(self) -> None:
        """Nothing is open."""


class SwapFile:
    """As `MainMemory`, in a file without a name in `policy.nvme_path`, with places of `nbytes` bytes in pages; it grows to the most blocks
    that were out at one time. pin: blocks are on a GPU. counters: bytes that were read and written.

    Raises:
        ValueError: the folder is not on a disk that takes direct I/O.
    """

    def __init__(self, policy: OffloadPolicy, *, nbytes: int, pin: bool) -> None:
        assert policy.nvme_path is not None, "the policy has a folder"
        probe_folder(policy.nvme_path, direct=policy.direct_io)
        self.counters = IoCounters()
        self._nbytes, self._stride = nbytes, -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        self._disk = DiskFile(Path(policy.nvme_path) / f"blocks-{uuid.uuid4().hex}", direct=policy.direct_io)
        self._staging = AlignedRegion(nbytes=policy.threads * policy.block_bytes, pin=False)
        self._engine = IoEngine(
            self._disk,
            staging=list(self._staging.bytes.view(policy.threads, policy.block_bytes)),
            block_bytes=policy.block_bytes,
            counters=self.counters,
        )
        self._buffers = AlignedRegion(nbytes=_AT_ONCE * self._stride, pin=pin)
        self._free: list[int] = []
        self._places = 0
        self._close = weakref.finalize(self, _close, self._engine, self._disk)
        # pyrefly: ignore[missing-attribute]  # a property, which typeshed leaves out of __slots__
        self._close.atexit = False  # the engine has its own way to end with the process

    def write(self, blocks: list[Tensor]) -> list[int]:
        """uint8 [bytes] each. Raises DiskError if the disk is full or fails."""
        places = [self._take() for _ in blocks]
        for first in range(0, len(blocks), _AT_ONCE):
            some = blocks[first : first + _AT_ONCE]
            for buffer, block in zip(self._each(), some, strict=False):
                buffer[: self._nbytes].copy_(block)
            self._move(Direction.write, places=places[first : first + _AT_ONCE])
        return places

    def read(self, handles: list[int], *, into: list[Tensor]) -> None:
        """uint8 [bytes] each. Raises DiskError if the disk fails."""
        for first in range(0, len(handles), _AT_ONCE):
            some = handles[first : first + _AT_ONCE]
            self._move(Direction.read, places=some)
            for buffer, target in zip(self._each(), into[first : first + _AT_ONCE], strict=False):
                target.copy_(buffer[: self._nbytes])

    def free(self, handles: list[int]) -> None:
        """Makes their places available again."""
        self._free += handles

    def close(self) -> None:
        """Ends the threads and frees the file's space. Idempotent."""
        self._close()

    def _each(self) -> list[Tensor]:
        return list(self._buffers.bytes.view(_AT_ONCE, self._stride))

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        self._places += 1
        return self._places - 1

    def _move(self, direction: Direction, *, places: list[int]) -> None:
        """Transfers between the buffers and these places of the file, and waits."""
        moved = [
            Transfer(
                direction=direction,
                offset=place * self._stride,
                nbytes=self._stride,
                padded_bytes=self._stride,
                urgency=Urgency.awaited,
                memory=buffer,
            )
            for place, buffer in zip(places, self._each(), strict=False)
        ]
        for transfer in moved:
            self._engine.submit(transfer, after=())
        with self._engine.changed:
            while not all(transfer.done for transfer in moved):
                self._engine.changed.wait()
        for transfer in moved:
            if transfer.error is not None:
                raise transfer.error


def _close(engine: IoEngine, disk: DiskFile) -> None:
    engine.close()
    disk.close()
