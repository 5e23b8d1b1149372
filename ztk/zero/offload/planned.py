"""The stores of a plan: the real ones over memory without values and a file that does not exist. Bookkeeping and counters are the same.

A planned transfer ends when it is submitted, so no read is served from the memory of a running write. A plan's disk reads therefore
equal the reads of a disk that keeps up.
"""

from collections.abc import Callable

from torch import Tensor

from ztk.core.runtime.io import Direction, IoCounters
from ztk.core.runtime.planned import host_bytes, is_host_memory
from ztk.core.runtime.streams import copy_behind
from ztk.zero.offload.disk import DiskFile
from ztk.zero.offload.host import HostStore
from ztk.zero.offload.io_engine import IoEngine, Transfer
from ztk.zero.offload.nvme import NvmeStore
from ztk.zero.offload.pool import AlignedRegion


class PlannedRegion(AlignedRegion):
    """Host memory of a plan."""

    def __init__(self, *, nbytes: int) -> None:
        self.bytes: Tensor = host_bytes(nbytes)

    def close(self) -> None:
        """Does nothing: no memory is locked."""


class PlannedHostStore(HostStore):
    """A host tier whose slots have no values."""

    def _region(self, nbytes: int) -> AlignedRegion:
        return PlannedRegion(nbytes=nbytes)


class PlannedFile(DiskFile):
    """A file that takes no space."""

    def __init__(self) -> None:
        self.preallocated = 0

    def preallocate(self, *, offset: int, nbytes: int) -> None:
        """Does nothing: there is always space."""
        self.preallocated = offset + nbytes

    def sync(self) -> None:
        """Does nothing: no write is pending."""

    def close(self) -> None:
        """Does nothing: no file is open."""


class PlannedIo(IoEngine):
    """Counts every block of a transfer and ends it at once, in the caller's thread. Data between the disk and the device is moved by a copy
    that dispatch modes intercept."""

    def __init__(self, disk: DiskFile, *, counters: IoCounters, block_bytes: int) -> None:
        super().__init__(disk, staging=[], block_bytes=block_bytes, counters=counters)

    def _start(self, transfer: Transfer) -> None:
        nbytes = 0 if transfer.kept is not None else transfer.padded_bytes
        for start in range(0, nbytes, self._block_bytes):
            length = min(self._block_bytes, nbytes - start)
            payload = min(length, transfer.nbytes - start)
            self.request(transfer.direction, nbytes=length, payload_bytes=payload)
        memory = transfer.memory
        if memory is not None and not is_host_memory(memory.untyped_storage()):
            host = host_bytes(memory.nbytes)
            source, out = (memory, host) if transfer.direction is Direction.write else (host, memory)
            if transfer.ready is None:
                out.copy_(source)
            else:
                copy_behind(transfer.ready, source=source, out=out)
        self._finish(transfer)

    def request(self, direction: Direction, *, nbytes: int, payload_bytes: int) -> None:
        """Records one system call of a transfer."""
        with self._counters.moving(direction, nbytes=nbytes, payload_bytes=payload_bytes):
            pass


class PlannedNvmeStore(NvmeStore):
    """A disk tier without a disk."""

    def _open(self, *, rank: int, open_disk: Callable[..., DiskFile]) -> DiskFile:
        return PlannedFile()

    def _region(self, nbytes: int) -> AlignedRegion:
        return PlannedRegion(nbytes=nbytes)

    def _start_engine(self, counters: IoCounters) -> IoEngine:
        return PlannedIo(self._disk, counters=counters, block_bytes=self._policy.staging_bytes)
