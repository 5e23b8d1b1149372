"""Keys and values in blocks of 64 positions, a table of blocks per sequence, and copies of blocks elsewhere."""

from typing import Any

import torch
from torch import Tensor

from ztk.inference.attention import BLOCK
from ztk.inference.block_steps import BlockStep, block_step
from ztk.inference.block_swap import MainMemory, Swap
from ztk.inference.cache import Cache
from ztk.inference.describe import Description
from ztk.inference.device_tables import DeviceTables
from ztk.inference.steps import Span
from ztk.kernels import copy_blocks

_COPY, _SAVE, _RESTORE, _DROP, _SHORTEN, _PLACE = range(6)


class BlockCache(Cache):
    """store: [blocks, layers, 2, K, 64, D], so that a block of all layers is contiguous. tables: per slot, its blocks in order, `width` at
    most; on_device: copies of them.

    dtype: of keys and values. uint8 holds fp8 (e4m3), with `scales` fp32 [layers, 2, K] or None: see [Note: Scales of an fp8 cache] in
    ztk/inference/memory.py.
    swap: store for copies of preempted sequences' blocks.
    """

    def __init__(
        self,
        description: Description,
        *,
        slots: int,
        blocks: int,
        width: int,
        device: torch.device,
        dtype: torch.dtype,
        swap: Swap | None = None,
    ) -> None:
        super().__init__()
        self._group = description.heads // description.kv_heads
        shape = (blocks, description.layers, 2, description.kv_heads, BLOCK, description.head_dim)
        self._store = torch.empty(shape, dtype=dtype, device=device)
        self.scales: Tensor | None = None
        self.tables: list[list[int]] = [[] for _ in range(slots)]
        self.on_device = DeviceTables(self.tables, width=width, device=device)
        self.blocks, self.device, self.dtype, self.swap = blocks, device, dtype, swap or MainMemory()
        self._copies: dict[int, Any] = {}  # by number, the same one on all ranks
        self._saved = 0  # copies so far
        self._told: list[list[int]] = [[] for _ in range(slots)]  # tables as the other ranks have them

    @property
    def positions(self) -> int:
        """Capacity in positions of all sequences together."""
        return self.blocks * BLOCK

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self._store.nbytes

    def keys(self, layer: int) -> Tensor:
        """[blocks, K, 64, D] of one layer; the stride between blocks spans all layers."""
        return self._store[:, layer, 0]

    def values(self, layer: int) -> Tensor:
        """[blocks, K, 64, D] of one layer."""
        return self._store[:, layer, 1]

    def scales_of(self, layer: int) -> Tensor | None:
        """fp32 [2, K]: the factors of each head's stored keys and values."""
        return None if self.scales is None else self.scales[layer]

    def step(self, spans: list[Span]) -> BlockStep:
        return block_step(spans, cache=self, tables=self.tables, on_device=self.on_device, group=self._group)

    def recompute(self, slot: int, *, tokens: list[int]) -> list[int]:
        """Recomputes keys and values in place: a block that other sequences share gets the same numbers again."""
        return tokens[: len(self.tables[slot]) * BLOCK]

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copies blocks: (source, target) each."""
        for source, target in pairs:
            self._note(_COPY, source, target)
        flat = self._store.view(self.blocks, -1)
        copy_blocks(flat, torch.tensor(pairs, dtype=torch.int64).to(self.device))

    def save(self, blocks: list[int]) -> list[int]:
        """Copies blocks elsewhere, until `drop`, and returns a number for each copy. Raises DiskError as `SwapFile`."""
        handles = self.swap.write([self._bytes(block) for block in blocks])
        numbers = list(range(self._saved, self._saved + len(blocks)))
        self._saved += len(blocks)
        self._copies.update(zip(numbers, handles, strict=True))
        for block in blocks:
            self._note(_SAVE, block)
        return numbers

    def restore(self, copies: list[int], *, blocks: list[int]) -> None:
        """Copies blocks from `save` into other blocks. Raises DiskError as `SwapFile`."""
        for number, block in zip(copies, blocks, strict=True):
            self._note(_RESTORE, number, block)
        self.swap.read([self._copies[number] for number in copies], into=[self._bytes(block) for block in blocks])

    def drop(self, copies: list[int]) -> None:
        """Frees copies from `save`."""
        for number in copies:
            self._note(_DROP, number)
        self.swap.free([self._copies.pop(number) for number in copies])

    def close(self) -> None:
        self.swap.close()

    def take_log(self, spans: list[Span]) -> list[int]:
        """Includes the changes of the tables of these sequences."""
        for span in spans:
            own, told = self.tables[span.slot], self._told[span.slot]
            if len(told) > len(own):
                self._note(_SHORTEN, span.slot, len(own))
                del told[len(own) :]
            same = len(told) if own[: len(told)] == told else 0  # a sequence that continues: its new blocks only
            for place, block in enumerate(own[same:], start=same):
                if place >= len(told) or told[place] != block:
                    self._note(_PLACE, span.slot, place, block)
            told[:] = own
        return super().take_log(spans)

    def _repeat(self, change: int, *, numbers: list[int]) -> None:
        first, second, third = numbers
        if change == _COPY:
            self.copy([(first, second)])
        elif change == _SAVE:
            self.save([first])
        elif change == _RESTORE:
            self.restore([first], blocks=[second])
        elif change == _DROP:
            self.drop([first])
        elif change == _SHORTEN:
            del self.tables[first][second:]
        else:
            self.tables[first][second : second + 1] = [third]

    def _bytes(self, block: int) -> Tensor:
        return self._store[block].view(-1).view(torch.uint8)


def block_bytes(description: Description, *, dtype: torch.dtype) -> int:
    """Bytes of a block of all layers."""
    return description.layers * 2 * description.kv_heads * BLOCK * description.head_dim * dtype.itemsize
