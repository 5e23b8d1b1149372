"""Keys and values in blocks of 64 positions, a table of blocks per sequence, and copies of blocks in main memory."""

import torch
from torch import Tensor

from ztk.inference.attention import BLOCK
from ztk.inference.describe import Description
from ztk.kernels import copy_blocks


class BlockCache:
    """store: [blocks, layers, 2, K, 64, D], so that a block of all layers is one piece of memory. tables: per slot, its blocks in order.

    dtype: of keys and values; uint8: fp8 (e4m3).
    """

    def __init__(
        self, description: Description, *, slots: int, blocks: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (blocks, description.layers, 2, description.kv_heads, BLOCK, description.head_dim)
        self._store = torch.empty(shape, dtype=dtype, device=device)
        self.tables: list[list[int]] = [[] for _ in range(slots)]
        self.blocks, self.device = blocks, device

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

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Blocks become others: (source, target) each."""
        flat = self._store.view(self.blocks, -1)
        copy_blocks(flat, torch.tensor(pairs, dtype=torch.int64).to(self.device))

    def save(self, blocks: list[int]) -> list[Tensor]:
        """Copies of blocks in main memory, page-locked where the cache is on a GPU: [layers, 2, K, 64, D] each."""
        copies = []
        for block in blocks:
            source = self._store[block]
            copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=self.device.type == "cuda")
            copies.append(copy.copy_(source, non_blocking=True))
        return copies

    def restore(self, copies: list[Tensor], *, blocks: list[int]) -> None:
        """What `save` gave, into other blocks: [layers, 2, K, 64, D] each."""
        for copy, block in zip(copies, blocks, strict=True):
            self._store[block].copy_(copy, non_blocking=True)


def block_bytes(description: Description, *, dtype: torch.dtype) -> int:
    """Bytes of a block of all layers."""
    return description.layers * 2 * description.kv_heads * BLOCK * description.head_dim * dtype.itemsize
