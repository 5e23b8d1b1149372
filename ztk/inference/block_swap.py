"""Storage for copies of a preempted sequence's blocks: main memory, or a file that is written with direct I/O."""

from dataclasses import replace

import torch
from torch import Tensor

from ztk.core.policies.offload import MIN_BUFFER_COUNT, OffloadPolicy
from ztk.core.runtime.io import IoCounters
from ztk.core.runtime.memory import MemoryLedger
from ztk.core.runtime.pending import Handle
from ztk.zero.offload.nvme import NvmeSlot, NvmeStore


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
    """Does the work of `MainMemory` in an unnamed file in `policy.nvme_path`, for copies of `nbytes` bytes; it grows to the most blocks
    that were out at one time. counters: bytes that were read and written.

    Raises:
        ValueError: the folder is not on a disk that takes direct I/O.
    """

    def __init__(self, policy: OffloadPolicy, *, nbytes: int) -> None:
        self.counters, self._nbytes = IoCounters(), nbytes
        # Blocks are moved between their own memory and the file: the pool of buffers is not touched.
        small = replace(policy, buffer_count=MIN_BUFFER_COUNT, buffer_bytes=policy.block_bytes)
        self._store = NvmeStore(small, rank=0, ledger=MemoryLedger(), counters=self.counters)
        self._free: list[NvmeSlot] = []

    def write(self, blocks: list[Tensor]) -> list[NvmeSlot]:
        """uint8 [bytes] each. Raises ValueError if the disk is full, DiskError if it fails."""
        slots = [self._free.pop() if self._free else self._new() for _ in blocks]
        with torch.inference_mode(False):  # the disk's threads are outside of it
            _wait([self._store.put(slot, value=block) for slot, block in zip(slots, blocks, strict=True)])
        return slots

    def read(self, handles: list[NvmeSlot], *, into: list[Tensor]) -> None:
        """uint8 [bytes] each. Raises DiskError if the disk fails."""
        with torch.inference_mode(False):
            _wait([self._store.fetch_into(slot, out=target) for slot, target in zip(handles, into, strict=True)])

    def free(self, handles: list[NvmeSlot]) -> None:
        """Makes their places available again."""
        self._free += handles

    def close(self) -> None:
        """Ends the threads and frees the file's space. Idempotent."""
        self._store.close()

    def _new(self) -> NvmeSlot:
        return self._store.allocate(name="block", shape=(self._nbytes,), dtype=torch.uint8, category="cache")


def _wait(handles: list[Handle]) -> None:
    for handle in handles:
        handle.wait()
