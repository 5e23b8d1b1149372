"""Page-aligned host memory: O_DIRECT reads into it, and a GPU copies from it without a second copy."""

import bisect
import contextlib
import mmap
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ztk.core.policies.offload import PAGE_BYTES


class AlignedRegion:
    """One page-aligned, zero-filled range of anonymous host memory, page-locked on request.

    It is a mapping of its own, because torch's pinned allocator rounds every size up to a power of two. Pages become
    resident when they are first touched. Huge pages double the speed of direct I/O (fio on a virtual disk, kernel 6.18:
    reads 1.9 -> 3.8 GB/s, writes 3.5 -> 7.0), because each block is then a few contiguous pieces for the device.
    """

    def __init__(self, *, nbytes: int, pin: bool) -> None:
        size = max(PAGE_BYTES, -(-nbytes // PAGE_BYTES) * PAGE_BYTES)
        self._memory = _Mapping(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        aligned = torch.frombuffer(self._memory, dtype=torch.uint8)  # keeps the mapping alive as long as any view lives
        self.bytes = aligned[:nbytes]  # uint8 [nbytes]
        if pin:
            self._memory.lock(address=aligned.data_ptr())

    def close(self) -> None:
        """Unlocks the pages; they are freed with the last tensor that views them."""
        self._memory.unlock()


class _Mapping(mmap.mmap):
    """Memory that is unlocked before it is unmapped, even if its region is never closed. Otherwise the driver would keep the pages, and
    refuse to lock the next mapping at the same address."""

    _locked: int | None = None  # the address

    def lock(self, *, address: int) -> None:
        """Page-locks all of it. address: start of the mapping."""
        # pyrefly: ignore[missing-attribute]  # None is without a GPU
        _cuda_check(torch.cuda.cudart().cudaHostRegister(address, len(self), 0), "page-locking", len(self))
        self._locked = address

    def unlock(self) -> None:
        """Idempotent."""
        address, self._locked = self._locked, None
        if address is not None:
            # pyrefly: ignore[missing-attribute]  # None is without a GPU
            _cuda_check(torch.cuda.cudart().cudaHostUnregister(address), "unlocking", len(self))

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the driver may have ended before the interpreter
            self.unlock()


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """Bytes [start, stop) of the pool, in use until given back. is_buffer: one of the buffers, else a range of the rest."""

    start: int
    stop: int
    is_buffer: bool


class AlignedPool:
    """One region with a few buffers, each large enough for any request, a rest that is given out in ranges of the requested size, and one
    staging block per I/O thread. Nothing is allocated later.

    Requests take from the rest first, so that a small slot does not occupy a buffer that a large one needs.
    """

    def __init__(
        self,
        *,
        num_buffers: int,
        buffer_bytes: int,
        rest_bytes: int,
        num_staging: int,
        staging_bytes: int,
        new_region: Callable[[int], AlignedRegion],
    ) -> None:
        """new_region: allocates a region of the given number of bytes."""
        split = num_buffers * buffer_bytes + rest_bytes
        self.nbytes = split + num_staging * staging_bytes
        self._region = new_region(self.nbytes)
        self.staging: list[Tensor] = list(self._region.bytes[split:].view(num_staging, staging_bytes))
        self._buffers = [
            Lease(start=index * buffer_bytes, stop=(index + 1) * buffer_bytes, is_buffer=True)
            for index in range(num_buffers)
        ]
        self._free = [range(num_buffers * buffer_bytes, split)] if rest_bytes else []  # ascending, never adjoining
        self._taken: set[Lease] = set()

    def has_room(self, nbytes: int, *, leaving: int = 0) -> bool:
        """Whether the rest has a free range of `nbytes`, so that no buffer would be taken, and `leaving` bytes more."""
        sizes = [len(span) for span in self._free]
        return max(sizes, default=0) >= nbytes and sum(sizes) - nbytes >= leaving

    def take(self, nbytes: int) -> Lease | None:
        """Memory for `nbytes` (a multiple of a page), or None. Uses the shortest free range of the rest that is long enough, else a buffer."""
        return self.take_range(nbytes) or self._take_buffer(sparing=0)

    def take_spare(self, nbytes: int, *, leaving: int) -> Lease | None:
        """Takes memory like `take`, but leaves `leaving` bytes of the rest and one buffer free."""
        if self.has_room(nbytes, leaving=leaving):
            return self.take_range(nbytes)
        return self._take_buffer(sparing=1)

    def take_range(self, nbytes: int) -> Lease | None:
        """Memory for `nbytes` (a multiple of a page) in the rest, or None."""
        fits = [span for span in self._free if len(span) >= nbytes]
        if not fits:
            return None
        span = min(fits, key=len)
        self._free.remove(span)
        lease = Lease(start=span.start, stop=span.start + nbytes, is_buffer=False)
        if len(span) > nbytes:
            self._insert(range(lease.stop, span.stop))
        self._taken.add(lease)
        return lease

    def _take_buffer(self, *, sparing: int) -> Lease | None:
        if len(self._buffers) <= sparing:
            return None
        lease = self._buffers.pop()  # the most recently used one: its pages are warm
        self._taken.add(lease)
        return lease

    def give(self, lease: Lease) -> None:
        """Returns the memory to the pool."""
        assert lease in self._taken, f"{lease} given back twice"
        self._taken.remove(lease)
        if lease.is_buffer:
            self._buffers.append(lease)
        else:
            self._insert(range(lease.start, lease.stop))

    def memory(self, lease: Lease) -> Tensor:
        """The memory of a lease, uint8 [stop - start]."""
        return self._region.bytes[lease.start : lease.stop]

    def close(self) -> None:
        self._region.close()

    def _insert(self, span: range) -> None:
        """Adds a free range and merges it with adjacent free ranges."""
        start, stop = span.start, span.stop
        for other in list(self._free):
            if other.stop == start or other.start == stop:
                self._free.remove(other)
                start, stop = min(start, other.start), max(stop, other.stop)
        bisect.insort(self._free, range(start, stop), key=lambda free: free.start)


def _cuda_check(status: int, action: str, nbytes: int) -> None:
    if int(status) != 0:
        raise RuntimeError(
            f"{action} {nbytes} bytes of host memory failed with CUDA error {int(status)}: raise the limit of locked "
            "memory (ulimit -l) or set offload.pin_memory=false"
        )
