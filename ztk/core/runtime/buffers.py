"""Flat buffers that are needed for a moment: gathered parameters, and gradients on their way to their shard.

Buffers are kept for reuse. On the CPU a fresh allocation costs a page fault per 4 KiB, measured 0.1 s per GB and step; on a GPU
the reuse keeps the caching allocator from growing. A buffer has the dtype that it was acquired with.
"""

import torch
from torch import Tensor

from ztk.core.runtime.memory import MemoryLedger, Tier
from ztk.core.runtime.planned import host_bytes, is_planned

_OWN_REFERENCES = (
    3  # of a buffer's storage in `release`: the pool's tensor, the caller's, and the Python object that is asked
)


class BufferPool:
    """Hands out 1-D buffers. It never keeps more buffers than were in use at one time.

    The ledger counts buffers under `category` as long as they exist, in use or not. elements_in_use: what the callers have now.
    """

    def __init__(self, *, device: torch.device, ledger: MemoryLedger, category: str, tier: Tier = Tier.device) -> None:
        self._device, self._ledger, self._category, self._tier = device, ledger, category, tier
        self._free: list[Tensor] = []  # uint8, by size
        self._used: dict[int, tuple[Tensor, int]] = {}  # identity of its storage -> uint8, the elements asked for
        self._shown: list[
            tuple[Tensor, bool]
        ] = []  # released while others had a view of it; whether its values will change
        self.elements_in_use = 0

    @torch.inference_mode(False)  # training writes to buffers that an evaluation allocated
    def acquire(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        """A buffer [numel] of `dtype` with undefined content."""
        self._take_back()
        nbytes = numel * dtype.itemsize
        fitting = next((buffer for buffer in self._free if buffer.numel() >= nbytes), None)
        if fitting is not None:
            self._free = [buffer for buffer in self._free if buffer is not fitting]
        else:
            if self._free:  # the new buffer replaces the largest of those that are too small
                self._ledger.remove(tier=self._tier, category=self._category, nbytes=self._free.pop().numel())
            fitting = self._allocate(nbytes)
            self._ledger.add(tier=self._tier, category=self._category, nbytes=nbytes)
        self._used[fitting.untyped_storage()._cdata] = fitting, numel
        self.elements_in_use += numel
        return fitting[:nbytes].view(dtype)

    def _allocate(self, nbytes: int) -> Tensor:
        if is_planned(self._device) and self._tier is Tier.host:
            return host_bytes(nbytes)
        beside_a_gpu = self._tier is Tier.host and torch.cuda.is_initialized()
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device, pin_memory=beside_a_gpu)

    def owns(self, buffer: Tensor | None) -> bool:
        """`buffer`, a flat tensor [n], was acquired here and not released yet."""
        return buffer is not None and buffer.untyped_storage()._cdata in self._used

    def release(self, buffer: Tensor, *, may_be_viewed: bool = False, is_changing: bool = True) -> None:
        """The caller no longer uses `buffer`.

        may_be_viewed: others were shown its memory. As long as one of them has a view, it is not handed out again.
        is_changing: `invalidate_views` applies to it.
        """
        released, numel = self._used.pop(buffer.untyped_storage()._cdata)
        self.elements_in_use -= numel
        if may_be_viewed and references(released) > _OWN_REFERENCES:
            self._shown.append((released, is_changing))
        else:
            self._put_back(released)

    def invalidate_views(self) -> None:
        """What views of released buffers show is about to change elsewhere: from now on they read as NaN, not as what was."""
        self._take_back()
        for buffer, is_changing in self._shown:
            if is_changing:
                buffer.fill_(0xFF)  # NaN in every floating-point dtype
                self._ledger.remove(tier=self._tier, category=self._category, nbytes=buffer.numel())
        self._shown = [entry for entry in self._shown if not entry[1]]

    def _take_back(self) -> None:
        """Buffers of which nobody has a view any more are free."""
        if not self._shown:
            return
        shown, self._shown = self._shown, []
        while shown:
            buffer, is_changing = shown.pop()
            if references(buffer) > _OWN_REFERENCES - 1:  # the caller of `release` has returned
                self._shown.append((buffer, is_changing))
            else:
                self._put_back(buffer)

    def _put_back(self, buffer: Tensor) -> None:
        self._free.append(buffer)
        self._free.sort(key=Tensor.numel)

    def drop_free(self) -> None:
        """Frees the memory of the buffers that are not in use."""
        self._take_back()
        nbytes = sum(buffer.numel() for buffer in self._free)
        self._ledger.remove(tier=self._tier, category=self._category, nbytes=nbytes)
        self._free.clear()


def references(buffer: Tensor) -> int:
    """To the storage of `buffer`, of any shape: tensors, and the Python object by which this call asks."""
    return torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)
