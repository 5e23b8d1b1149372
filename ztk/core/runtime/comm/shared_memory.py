"""Collectives through shared memory, for ranks of one machine without GPUs.

Each rank owns a slab of two slots. A collective runs in chunks: write the own part into a slot, barrier, read the peers' parts.
One barrier per chunk suffices because slots alternate: a rank writes slot s again only after the next barrier, which
every rank reaches only when it has finished reading s.

Bytes per rank for a tensor of n bytes on N ranks: all-gather writes n/N and reads n(N-1)/N, reduce-scatter writes and reads
n(N-1)/N; nothing is sent twice. Measured at 64 MB on 2 cores: 1.4 to 3.2 GB/s, gloo's own collectives 0.2 to 0.5.

A buffer made by `empty` is itself in shared memory. Its collectives need no slots: after a barrier each rank reads the others' buffers in
place, and after a second barrier all may write again. In a sum each rank computes its own slice; in an all-reduce it also writes that slice
into every rank's buffer.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from ztk.core.runtime.comm.node import NodeGroup
from ztk.core.runtime.comm.transport import Transport, sum_in_rank_order

SLOT_BYTES = 4 << 20  # two slots a rank: 8 MiB of shared memory each
_HEADER_BYTES = 64  # of a chunk of unequal parts
_PIECE_BYTES = 1 << 18  # of shared buffers at one time: a few of them stay in the second-level cache


class SharedMemoryTransport(Transport):
    """See the module's docstring. Tensors are flat, contiguous, on the CPU."""

    blocking = True
    checks_labels = True

    def __init__(self, *, group: dist.ProcessGroup, timeout_seconds: float, slot_bytes: int = SLOT_BYTES) -> None:
        self._node = NodeGroup(group=group, slab_bytes=2 * slot_bytes, timeout_seconds=timeout_seconds)
        self._sockets = self._node.peer_sockets()
        self._rank, self._size = group.rank(), group.size()
        self._slots = [[slab[:slot_bytes], slab[slot_bytes:]] for slab in self._node.slabs]
        self._slot_bytes = slot_bytes
        self._turn = 0
        # Address of a buffer of `empty` -> every rank's buffer; None for this rank's, which is freed with its last view.
        self._shared: dict[int, list[Tensor | None]] = {}

    def empty(self, numel: int, *, dtype: torch.dtype, label: str) -> Tensor:
        """[numel] in memory that all ranks share. A collective call."""
        segments = self._node.share(numel * dtype.itemsize, label=label)
        everyone: list[Tensor | None] = [torch.frombuffer(segment, dtype=dtype) for segment in segments]
        own, everyone[self._rank] = everyone[self._rank], None
        assert own is not None, "everyone has the own segment"
        self._shared[own.data_ptr()] = everyone
        weakref.finalize(segments[self._rank], self._shared.pop, own.data_ptr())  # runs when its last view is gone
        return own

    def _buffers(self, full: Tensor) -> list[Tensor] | None:
        """Every rank's `full`, if `empty` made it; else None."""
        everyone = self._shared.get(full.data_ptr())
        # pyrefly: ignore[missing-attribute]  # only the own entry is None
        if everyone is None or everyone[self._rank - 1].numel() != full.numel():
            return None
        return [full if buffer is None else buffer for buffer in everyone]

    @contextmanager
    def _reading(self, label: str) -> Iterator[None]:
        """Inside the block, all ranks have filled their shared buffers and none changes them. The barrier's label differs from the
        slots'."""
        self._node.barrier(f"shared {label}")
        yield
        self._node.barrier(f"shared {label}")

    def _next_slots(self, dtype) -> list[Tensor]:
        """The current slot of every rank, viewed as `dtype`."""
        self._turn ^= 1
        return [slots[self._turn].view(dtype) for slots in self._slots]

    def all_reduce(self, full: Tensor, *, own: Tensor, label: str) -> None:
        if (buffers := self._buffers(full)) is None:
            super().all_reduce(full, own=own, label=label)
            return
        parts = [buffer.chunk(self._size)[self._rank] for buffer in buffers]
        others = [parts[peer] for peer in self._peers()]
        with self._reading(label):
            for cut in _cuts(own):
                sum_in_rank_order([part[cut] for part in parts], out=own[cut])
                for other in others:
                    other[cut].copy_(own[cut])

    def all_gather(self, full: Tensor, *, label: str) -> None:
        if (buffers := self._buffers(full)) is not None:
            with self._reading(label):
                for peer in self._peers():
                    full.chunk(self._size)[peer].copy_(buffers[peer].chunk(self._size)[peer])
            return
        parts = full.chunk(self._size)
        step = self._slot_bytes // full.itemsize
        for start in range(0, parts[0].numel(), step):
            slots = self._next_slots(full.dtype)
            own = parts[self._rank][start : start + step]
            slots[self._rank][: own.numel()].copy_(own)
            self._node.barrier(label)
            for peer in self._peers():
                parts[peer][start : start + step].copy_(slots[peer][: own.numel()])

    def reduce_scatter(self, full: Tensor, *, out: Tensor, label: str) -> None:
        if (buffers := self._buffers(full)) is not None:
            parts = [buffer.chunk(self._size)[self._rank] for buffer in buffers]
            with self._reading(label):
                for cut in _cuts(out):
                    sum_in_rank_order([part[cut] for part in parts], out=out[cut])
            return
        parts = full.chunk(self._size)
        step = self._slot_bytes // full.itemsize // self._size // 64 * 64
        for start in range(0, out.numel(), step):
            pieces = self._exchange(parts, start=start, step=step, label=label)
            sum_in_rank_order(pieces, out=out[start : start + step])

    def all_to_all(self, source: Tensor, *, out: Tensor, label: str) -> None:
        parts, out_parts = source.chunk(self._size), out.chunk(self._size)
        step = self._slot_bytes // source.itemsize // self._size // 64 * 64
        for start in range(0, parts[0].numel(), step):
            pieces = self._exchange(parts, start=start, step=step, label=label)
            for out_part, piece in zip(out_parts, pieces, strict=True):
                out_part[start : start + step].copy_(piece)

    def _exchange(self, parts: tuple[Tensor, ...], *, start: int, step: int, label: str) -> list[Tensor]:
        """Every rank's piece for this rank, in rank order; the own one straight from `parts`."""
        slots = self._next_slots(parts[0].dtype)
        length = parts[0][start : start + step].numel()
        for peer in self._peers():
            slots[self._rank][peer * step : peer * step + length].copy_(parts[peer][start : start + step])
        self._node.barrier(label)
        pieces = [slots[peer][self._rank * step : self._rank * step + length] for peer in range(self._size)]
        pieces[self._rank] = parts[self._rank][start : start + step]
        return pieces

    def all_to_all_uneven(
        self, source: Tensor, *, out: Tensor, send: Sequence[int], receive: Sequence[int], label: str
    ) -> None:
        """Runs chunk by chunk until every rank's largest part is complete. In the first chunk each rank announces its number of chunks."""
        parts, out_parts = source.split(list(send)), out.split(list(receive))
        step = (self._slot_bytes - _HEADER_BYTES) // source.itemsize // self._size // 64 * 64
        chunks = [max(1, -(-max(send) // step))] * self._size
        number = 0
        while number < max(chunks):
            slots = self._next_slots(torch.uint8)
            heads = [slot[:_HEADER_BYTES].view(torch.int64) for slot in slots]
            bodies = [slot[_HEADER_BYTES:].view(source.dtype) for slot in slots]
            heads[self._rank][0] = chunks[self._rank]
            for peer in self._peers():
                piece = parts[peer][number * step : (number + 1) * step]
                bodies[self._rank][peer * step : peer * step + piece.numel()].copy_(piece)
            self._node.barrier(label)
            for peer in range(self._size):
                chunks[peer] = int(heads[peer][0])
                place = out_parts[peer][number * step : (number + 1) * step]
                mine = parts[peer][number * step : (number + 1) * step]
                begin = self._rank * step
                place.copy_(mine if peer == self._rank else bodies[peer][begin : begin + place.numel()])
            number += 1

    def broadcast(self, tensor: Tensor, *, source: int, label: str) -> None:
        step = self._slot_bytes // tensor.itemsize
        for start in range(0, tensor.numel(), step):
            slot = self._next_slots(tensor.dtype)[source]
            piece = tensor[start : start + step]
            if self._rank == source:
                slot[: piece.numel()].copy_(piece)
            self._node.barrier(label)
            if self._rank != source:
                piece.copy_(slot[: piece.numel()])

    def _peers(self) -> list[int]:
        return [peer for peer in range(self._size) if peer != self._rank]

    def send(self, tensor: Tensor, *, to: int, label: str) -> None:
        self._sockets.send(tensor, to=to, label=label)

    def recv(self, out: Tensor, *, source: int, label: str) -> None:
        self._sockets.recv(out, source=source, label=label)

    def close(self) -> None:
        self._sockets.close()
        self._node.close()


def _cuts(tensor: Tensor) -> Iterator[slice]:
    """Slices of at most `_PIECE_BYTES`."""
    step = _PIECE_BYTES // tensor.itemsize
    for start in range(0, tensor.numel(), step):
        yield slice(start, start + step)
