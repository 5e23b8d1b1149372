"""Keys and values in blocks of 64 positions, a table of blocks per sequence, and copies of blocks elsewhere."""

from typing import Any

import torch
from torch import Tensor

from ztk.inference.attention import BLOCK
from ztk.inference.block_swap import MainMemory, Swap
from ztk.inference.describe import Description
from ztk.kernels import copy_blocks


class BlockCache:
    """store: [blocks, layers, 2, K, 64, D], so that a block of all layers is one piece of memory. tables: per slot, its blocks in order.

    dtype: of keys and values; uint8: fp8 (e4m3), with `scales` fp32 [layers, 2, K] or None: [Note: Scales of an fp8 cache] in `block_opening`.
    swap: where copies of preempted sequences' blocks go.
    """

    def __init__(
        self,
        description: Description,
        *,
        slots: int,
        blocks: int,
        device: torch.device,
        dtype: torch.dtype,
        swap: Swap | None = None,
    ) -> None:
        shape = (blocks, description.layers, 2, description.kv_heads, BLOCK, description.head_dim)
        self._store = torch.empty(shape, dtype=dtype, device=device)
        self.scales: Tensor | None = None
        self.tables: list[list[int]] = [[] for _ in range(slots)]
        self.blocks, self.device, self.dtype, self.swap = blocks, device, dtype, swap or MainMemory()

    @property
    def positions(self) -> int:
        """Positions of all sequences together that there is memory for."""
        return self.blocks * BLOCK

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self._store.nbytes

    def keys(self, layer: int) -> Tensor:
        """[blocks, K, 64, D] of one layer; blocks are apart by those of all layers."""
        return self._store[:, layer, 0]

    def values(self, layer: int) -> Tensor:
        """[blocks, K, 64, D] of one layer."""
        return self._store[:, layer, 1]

    def scales_of(self, layer: int) -> Tensor | None:
        """fp32 [2, K]: what a stored number of each head's keys and values is times."""
        return None if self.scales is None else self.scales[layer]

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Blocks become others: (source, target) each."""
        flat = self._store.view(self.blocks, -1)
        copy_blocks(flat, torch.tensor(pairs, dtype=torch.int64).to(self.device))

    def save(self, blocks: list[int]) -> list[Any]:
        """Copies of blocks elsewhere, until `drop`; what is returned stands for them. Raises DiskError as `SwapFile`."""
        return self.swap.write([self._bytes(block) for block in blocks])

    def restore(self, copies: list[Any], *, blocks: list[int]) -> None:
        """What `save` gave, into other blocks. Raises DiskError as `SwapFile`."""
        self.swap.read(copies, into=[self._bytes(block) for block in blocks])

    def drop(self, copies: list[Any]) -> None:
        """What `save` gave is not needed any more."""
        self.swap.free(copies)

    def _bytes(self, block: int) -> Tensor:
        return self._store[block].view(-1).view(torch.uint8)


def block_bytes(description: Description, *, dtype: torch.dtype) -> int:
    """Bytes of a block of all layers."""
    return description.layers * 2 * description.kv_heads * BLOCK * description.head_dim * dtype.itemsize
