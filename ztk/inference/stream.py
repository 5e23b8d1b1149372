"""Layers that are read from a file, or copied to a GPU, while the previous one computes."""

import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Generic

from ztk.core.policies.offload import OffloadPolicy
from ztk.core.runtime.io import Direction, IoCounters
from ztk.inference.parts import Built, LayerBuffer, LayerFile
from ztk.zero.offload.disk import DiskFile
from ztk.zero.offload.io_engine import IoEngine, Transfer, Urgency
from ztk.zero.offload.pool import AlignedRegion
from ztk.zero.offload.probe import check_disk

BUFFERS = 3  # one in use, one being read, and one complete


class StreamedLayers(Generic[Built]):
    """The layers of a file in order. Some reside in memory, the others pass through a ring of buffers, in every pass.

    While a layer computes, threads read the next ones, bypassing the page cache; after the last layer, the next pass's. Only one thread
    may iterate, and the layer that an iteration returned is valid until the next one is requested.

    Raises:
        ValueError: the folder is in main memory or on a disk without direct I/O.
    """

    def __init__(self, file: LayerFile[Built], *, policy: OffloadPolicy, buffers: int, pin: bool = False) -> None:
        """pin: page-lock the memory of layers."""
        self.file, self.counters, self._pin = file, IoCounters(), pin
        check_disk(file.path.parent, direct=policy.direct_io)
        self._disk = _open(file.path, direct=policy.direct_io)
        self._staging = AlignedRegion(nbytes=policy.threads * policy.block_bytes, pin=False)
        self._engine = IoEngine(
            self._disk,
            staging=list(self._staging.bytes.view(policy.threads, policy.block_bytes)),
            block_bytes=policy.block_bytes,
            counters=self.counters,
        )
        self._close = weakref.finalize(self, _close, self._engine, self._disk)
        # pyrefly: ignore[missing-attribute]  # a property, which typeshed leaves out of __slots__
        self._close.atexit = False  # the engine has its own way to end with the process
        self._resident: dict[int, LayerBuffer[Built]] = {}
        self._numbers = list(range(file.count))  # of the layers of a pass
        self._order = self._numbers  # of those that are read in every pass
        self._spare = [file.buffer(pin=pin) for _ in range(buffers)]
        self._ring: deque[LayerBuffer[Built]] = deque()  # in the order in which they will be used
        self._next = 0  # place in `_order` of the layer that is read next
        self._fill()

    @property
    def held(self) -> list[Built]:
        """The layers in memory now; waits for running reads."""
        self.settle()
        return [buffer.layer for buffer in (*self._resident.values(), *self._ring)]

    @property
    def streamed(self) -> int:
        """Layers that are read in every pass."""
        return len(self._order)

    @property
    def pass_bytes(self) -> int:
        """Bytes that a pass reads."""
        return self.streamed * self.file.nbytes

    @property
    def memory_bytes(self) -> int:
        """Bytes of resident layers, ring and the blocks of the threads."""
        own = (*self._resident.values(), *self._ring, *self._spare)
        return sum(buffer.memory.nbytes for buffer in own) + self._staging.bytes.nbytes

    def only(self, numbers: list[int]) -> None:
        """Passes have these layers alone from now on, in order. None is resident."""
        self._restart(0, reading=False)
        self._resident.clear()
        self._numbers = self._order = numbers
        self._fill()

    def keep(self, count: int, *, buffers: int) -> None:
        """Makes `count` layers resident, at equal distances, so that reads overlap with their compute. buffers: new size of the ring."""
        self._restart(0, reading=False)
        del self._spare[buffers:]
        for number in spread(self._numbers, count=count):
            buffer = self._resident[number] = self.file.buffer(pin=self._pin)
            self._read(buffer, number=number)
            self._wait(buffer)
        self._order = [number for number in self._numbers if number not in self._resident]
        self._fill()

    def __iter__(self) -> Iterator[Built]:
        return (buffer.layer for buffer in self.buffers())

    def buffers(self) -> Iterator[LayerBuffer[Built]]:
        """The buffers of one pass. Each has its layer until the next one is requested."""
        for number in self._numbers:
            if number in self._resident:
                yield self._resident[number]
                continue
            if not self._ring or self._ring[0].number != number:  # an earlier pass was not finished
                self._restart(self._order.index(number))
            buffer = self._ring[0]
            self._wait(buffer)
            yield buffer
            self._spare.append(self._ring.popleft())
            self._fill()

    def settle(self) -> None:
        """Waits for all reads."""
        for buffer in self._ring:
            self._wait(buffer)

    def close(self) -> None:
        """Ends the threads. Idempotent."""
        self._close()

    # Parts

    def _restart(self, place: int, *, reading: bool = True) -> None:
        """Starts the ring with the layer at `place` of the order. Errors of earlier reads were already raised."""
        for buffer in self._ring:
            self._ended(buffer)
        self._spare += self._ring
        self._ring.clear()
        self._next = place
        if reading:
            self._fill()

    def _fill(self) -> None:
        while self._spare and self._order:
            buffer = self._spare.pop()
            self._read(buffer, number=self._order[self._next])
            self._ring.append(buffer)
            self._next = (self._next + 1) % len(self._order)

    def _read(self, buffer: LayerBuffer[Built], *, number: int) -> None:
        nbytes = self.file.nbytes
        buffer.number = number
        buffer.under_way = Transfer(
            direction=Direction.read,
            offset=number * nbytes,
            nbytes=nbytes,
            padded_bytes=nbytes,
            urgency=Urgency.ahead,
            memory=buffer.memory,
        )
        self._engine.submit(buffer.under_way, after=())

    def _wait(self, buffer: LayerBuffer[Built]) -> None:
        """Raises DiskError if the read has failed; the next pass reads again."""
        self._ended(buffer)
        ended, buffer.under_way = buffer.under_way, None
        if ended is not None and ended.error is not None:
            buffer.number = None
            raise ended.error

    def _ended(self, buffer: LayerBuffer[Built]) -> None:
        with self._engine.changed:
            while buffer.under_way is not None and not buffer.under_way.done:
                self._engine.changed.wait()


def spread(numbers: list[int], *, count: int) -> list[int]:
    """`count` of the numbers, at equal distances and in their order."""
    total = len(numbers)
    return [numbers[place] for place in sorted({(2 * one + 1) * total // (2 * count) for one in range(count)})]


def _open(path: Path, *, direct: bool) -> DiskFile:
    try:
        return DiskFile.existing(path, direct=direct)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read past the page cache ({error.strerror}): put it on a local disk (ext4, xfs, btrfs), or use "
            "offload.direct_io=false"
        ) from error


def _close(engine: IoEngine, disk: DiskFile) -> None:
    engine.close()
    disk.close()
