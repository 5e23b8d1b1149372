"""Pool of short-lived flat buffers: gathered parameters, and gradients before they are reduced to their shard.

Buffers are kept for reuse. On the CPU a fresh allocation costs a page fault per 4 KiB, measured 0.1 s per GB and step; on a GPU
the reuse keeps the caching allocator from growing. A buffer has the dtype that it was acquired with.
"""

import torch
from torch import Tensor

from ztk.core.runtime.memory import MemoryLedger, Tier
from ztk.core.runtime.planned import host_bytes, is_planned

_OWN_REFERENCES = (
    3  # references to a storage during `release`: the pool's tensor, the caller's tensor, the storage's Python object
)


class BufferPool:
    """Hands out 1-D buffers, and keeps at most as many as were in use at one time.

    The ledger counts every buffer that exists under `category`, in use or not. `elements_in_use` counts the elements handed out now.
    """

    def __init__(self, *, device: torch.device, ledger: MemoryLedger, category: str, tier: Tier = Tier.device) -> None:
        self._device, self._ledger, self._category, self._tier = device, ledger, category, tier
        self._free: list[Tensor] = []  # uint8, by size
        self._used: dict[int, tuple[Tensor, int]] = {}  # identity of its storage -> uint8, the elements requested
        self._shown: list[tuple[Tensor, bool]] = []  # released while a view existed; whether the values will change
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
        """Returns `buffer` [n] to the pool.

        may_be_viewed: other code may hold views of the memory. The buffer is not handed out again while such a view exists.
        is_changing: `invalidate_views` overwrites the buffer with NaN.
        """
        released, numel = self._used.pop(buffer.untyped_storage()._cdata)
        self.elements_in_use -= numel
        if may_be_viewed and references(released) > _OWN_REFERENCES:
            self._shown.append((released, is_changing))
        else:
            self._put_back(released)

    def invalidate_views(self) -> None:
        """Overwrites released buffers that still have views with NaN, because the values they show are about to change elsewhere."""
        self._take_back()
        for buffer, is_changing in self._shown:
            if is_changing:
                buffer.fill_(0xFF)  # NaN in every floating-point dtype
                self._ledger.remove(tier=self._tier, category=self._category, nbytes=buffer.numel())
        self._shown = [entry for entry in self._shown if not entry[1]]

    def _take_back(self) -> None:
        """Frees released buffers whose last view is gone."""
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
    """Counts the references to the storage of `buffer` (any shape): tensors, and the Python object that this call creates."""
    return torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)
