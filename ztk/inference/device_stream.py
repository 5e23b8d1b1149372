"""Layers that pass through a GPU: some reside there, the others are copied while the previous one computes.

[Note: Layers on their way to a GPU]
A layer goes from a file through page-locked memory (`StreamedLayers`), or from page-locked memory that holds all of them (`HeldLayers`), into a
ring of buffers on the GPU. The copy of the next layer is issued before the work of the current one, on a stream of its own, so both overlap. It
waits for the work that was issued earlier, which includes the last use of its buffer. The host waits for a copy before the memory that it
reads is used again. The kernels compute with the same bytes as without streaming, so no bit of an answer changes.
"""

from collections.abc import Iterator
from typing import Generic

import torch

from ztk.core.runtime.io import IoCounters
from ztk.core.runtime.streams import Copy, start_copy
from ztk.inference.parts import Built, LayerBuffer, LayerFile
from ztk.inference.stream import BUFFERS, StreamedLayers, spread


class HeldLayers(Generic[Built]):
    """Layers in main memory, with the interface of `StreamedLayers` that `DeviceLayers` uses."""

    def __init__(self, file: LayerFile[Built]) -> None:
        self.file, self._numbers = file, list(range(file.count))
        self._layers = [
            LayerBuffer(layer=file.over(region.bytes), memory=region.bytes, region=region, number=number)
            for number, region in enumerate(file.held)
        ]

    @property
    def memory_bytes(self) -> int:
        """Bytes of all layers."""
        return self.file.count * self.file.nbytes

    def only(self, numbers: list[int]) -> None:
        """Passes have these layers alone from now on, in order. The others' memory is kept, for a later call."""
        self._numbers = numbers

    def keep(self, count: int, *, buffers: int) -> None:
        """Does nothing: all layers are in memory."""

    def buffers(self) -> Iterator[LayerBuffer[Built]]:
        """The memory of each layer of one pass."""
        return (self._layers[number] for number in self._numbers)

    def settle(self) -> None:
        """Does nothing: there are no reads."""

    def close(self) -> None:
        """Does nothing: the memory is freed with the object."""


class DeviceLayers(Generic[Built]):
    """The layers of `source` in order, on `device`: see [Note: Layers on their way to a GPU].

    Only one thread may iterate. It may give work with a layer to the current stream until it requests the next one. counters: bytes that were
    copied, as reads. buffers: size of the ring. host_layers: that `keep` makes resident in main memory, at most.
    """

    def __init__(
        self,
        source: StreamedLayers[Built] | HeldLayers[Built],
        *,
        device: torch.device,
        buffers: int,
        host_layers: int = 0,
    ) -> None:
        self.source, self.file, self.counters = source, source.file, IoCounters()
        self._device, self._host_layers = device, host_layers
        self._resident: dict[int, LayerBuffer[Built]] = {}
        self._order = list(range(self.file.count))  # of those that are copied in every pass
        self._ring = [self.file.device_buffer(device) for _ in range(buffers)]
        self._spare = list(self._ring)
        self._in_use: LayerBuffer[Built] | None = None
        self._pass: Iterator[LayerBuffer[Built]] = iter(())
        self._ahead: tuple[LayerBuffer[Built], Copy | None] | None = None

    @property
    def held(self) -> list[Built]:
        """The layers on the device, at least one; buffers of the ring may have any values."""
        return [buffer.layer for buffer in (*self._resident.values(), *self._ring)]

    @property
    def pass_bytes(self) -> int:
        """Bytes that a pass copies."""
        return len(self._order) * self.file.nbytes

    @property
    def memory_bytes(self) -> int:
        """Bytes of layers on the device."""
        return (len(self._resident) + len(self._ring)) * self.file.nbytes

    def keep(self, count: int, *, buffers: int) -> None:
        """Makes `count` layers resident on the device, and others in main memory, at equal distances. buffers: new size of the ring."""
        self._restart()
        del self._ring[buffers:], self._spare[buffers:]
        chosen = spread(list(range(self.file.count)), count=count)
        self.source.only(chosen)
        for number, given in zip(chosen, self.source.buffers(), strict=True):
            own = self._resident[number] = self.file.device_buffer(self._device)
            own.memory.copy_(given.memory)
        self._order = [number for number in range(self.file.count) if number not in self._resident]
        self.source.only(self._order)
        if self._order:
            self.source.keep(min(self._host_layers, len(self._order)), buffers=BUFFERS)

    def __iter__(self) -> Iterator[Built]:
        for number in range(self.file.count):
            if number in self._resident:
                yield self._resident[number].layer
                continue
            buffer = self._in_use = self._take(number)
            yield buffer.layer
            if self._in_use is buffer:  # no other pass has begun
                self._spare.append(buffer)
                self._in_use = None

    def settle(self) -> None:
        """Waits for all copies and reads."""
        if self._ahead is not None and self._ahead[1] is not None:
            self._ahead[1].synchronize()
        self.source.settle()

    def close(self) -> None:
        """Ends the threads of the source. Idempotent."""
        self.source.close()

    # Parts

    def _take(self, number: int) -> LayerBuffer[Built]:
        """The buffer with the layer, after the copy of the next layer has begun."""
        if self._ahead is None and self._in_use is None:  # the first layer, or the ring has one buffer
            self._ahead = self._start()
        if (
            self._ahead is None or self._ahead[0].number != number or self._in_use is not None
        ):  # a pass was not finished
            self._restart()
            self._ahead = self._start()
        assert self._ahead[0].number == number, "passes have the layers in their order"
        (buffer, copied), self._ahead = self._ahead, None
        if copied is not None:
            copied.synchronize()  # the source uses its memory again; work that is issued from now on follows the copy
        if self._spare:
            self._ahead = self._start()
        return buffer

    def _start(self) -> tuple[LayerBuffer[Built], Copy | None]:
        """Begins to copy the source's next layer; after the last one, the first one of the next pass."""
        given = next(self._pass, None)
        if given is None:
            self._pass = self.source.buffers()
            given = next(self._pass)
        buffer = self._spare.pop(0)
        buffer.number = given.number
        copied = start_copy(given.memory, out=buffer.memory)
        if copied is None:  # both are in main memory
            buffer.memory.copy_(given.memory)
        self.counters.read_bytes += self.file.nbytes
        return buffer, copied

    def _restart(self) -> None:
        """The next copy is of the first layer of a pass. All buffers are free, also if a pass was not finished."""
        self.settle()
        self._spare, self._in_use, self._ahead, self._pass = list(self._ring), None, None, iter(())
