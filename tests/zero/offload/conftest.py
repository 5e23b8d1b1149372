"""Stores over small pools, and disks that are slow or broken."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ztk.core.policies.offload import PAGE_BYTES as PAGE
from ztk.core.runtime.io import IoCounters
from ztk.core.runtime.memory import MemoryLedger
from ztk.zero.offload import DiskFile, NvmeStore, OffloadPolicy


@dataclass(kw_only=True)
class Faults:
    """The faults of a FaultyDisk, changeable while it runs."""

    read_delay: float = 0.0  # seconds per system call
    write_delay: float = 0.0
    write_error: int = 0  # errno of every write
    read_error: int = 0
    most_bytes: int = 1 << 40  # one call moves at most this many
    capacity: int = 1 << 60  # bytes of the file that can be reserved
    end_of_file: int = 1 << 60  # reads past it return nothing
    hold_writes: threading.Event = field(default_factory=threading.Event)  # writes wait until it is set
    log: list[tuple[str, int]] = field(default_factory=list)  # ("read" | "write", offset) at the end of each call

    def open(self, path: Path, *, direct: bool) -> "FaultyDisk":
        return FaultyDisk(path, direct=direct, faults=self)


class FaultyDisk(DiskFile):
    """A real file behind imperfect system calls."""

    def __init__(self, path: Path, *, direct: bool, faults: Faults) -> None:
        super().__init__(path, direct=direct)
        self._faults = faults

    def preallocate(self, *, offset: int, nbytes: int) -> None:
        if offset + nbytes > self._faults.capacity:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().preallocate(offset=offset, nbytes=nbytes)

    def read_some(self, buffer: memoryview, *, offset: int) -> int:
        time.sleep(self._faults.read_delay)
        if self._faults.read_error:
            raise OSError(self._faults.read_error, os.strerror(self._faults.read_error))
        if offset >= self._faults.end_of_file:
            return 0
        moved = super().read_some(buffer[: -(-self._faults.most_bytes // PAGE) * PAGE], offset=offset)
        self._faults.log.append(("read", offset))
        return min(moved, self._faults.most_bytes)

    def write_some(self, buffer: memoryview, *, offset: int) -> int:
        self._faults.hold_writes.wait(10)
        time.sleep(self._faults.write_delay)
        if self._faults.write_error:
            raise OSError(self._faults.write_error, os.strerror(self._faults.write_error))
        moved = super().write_some(buffer[: -(-self._faults.most_bytes // PAGE) * PAGE], offset=offset)
        self._faults.log.append(("write", offset))
        return min(moved, self._faults.most_bytes)


@pytest.fixture
def faults() -> Faults:
    found = Faults()
    found.hold_writes.set()
    return found


@pytest.fixture
def ledger() -> MemoryLedger:
    return MemoryLedger()


@pytest.fixture
def counters() -> IoCounters:
    return IoCounters()


@pytest.fixture
def make_store(
    tmp_path: Path, ledger: MemoryLedger, counters: IoCounters, faults: Faults
) -> Iterator[Callable[..., NvmeStore]]:
    """A factory of stores over a FaultyDisk with small blocks; they are closed after the test."""
    stores = []

    def make(**fields) -> NvmeStore:
        chosen = {"buffer_count": 3, "buffer_bytes": 4 * PAGE, "block_bytes": PAGE, "threads": 2} | fields
        policy = OffloadPolicy(optimizer="nvme", nvme_path=str(tmp_path / "nvme"), **chosen)
        stores.append(NvmeStore(policy, rank=0, ledger=ledger, counters=counters, open_disk=faults.open))
        return stores[-1]

    yield make
    faults.hold_writes.set()
    for store in stores:
        store.close()
