"""Keys and values in blocks of 64 positions, a table of blocks per sequence, and copies of blocks elsewhere."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ztk.inference.block_swap import MainMemory, SwapFile
from ztk.inference.cache import Cache, Change
from ztk.inference.cache_attention import BLOCK
from ztk.inference.describe import Description
from ztk.inference.steps import Attention, Span
from ztk.kernels import cache_rows, copy_blocks, make_tiles, paged_attention


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockStep:
    """A step's M rows: positions int64 [M]; places int64 [M], block times 64 plus position in it, -1 for padding; tables int32 [slots,
    blocks of the longest]; tiles int32 [Q, 5], see `ztk.kernels.paged_attention`. split: every sequence has one row, so segments are
    computed in parallel."""

    cache: "BlockCache"
    positions: Tensor
    places: Tensor
    tables: Tensor
    tiles: Tensor
    split: bool

    def attend(self, rows: Tensor, *, by: Attention, norms: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """As of `Step`, by two kernels."""
        cache, (cos, sin), own = self.cache, by.table or (None, None), norms or (None, None)
        keys, values, scales = cache.keys(by.layer), cache.values(by.layer), cache.scales_of(by.layer)
        places = (self.positions, self.places)
        query = cache_rows(rows, *own, cos, sin, *places, keys, values, scales, eps=by.eps)
        how = {"scale": by.scale, "window": by.window or 0, "softcap": by.softcap or 0.0, "split": self.split}
        return paged_attention(query, keys, values, self.tables, self.tiles, by.slopes, scales, **how).flatten(1)


class DeviceTables:
    """Copies in `tensor`, int32 [slots, width], of the tables of all slots, lists that their owner changes.

    Most sequences continue in the next step: their tables are equal, or longer by one block. Making a tensor of all entries takes the host
    longer than comparing the lists. Entries after a table's end are undefined: numbers of blocks that it had before, or 0.
    """

    def __init__(self, tables: list[list[int]], *, width: int, device: torch.device) -> None:
        self.tensor = torch.zeros(len(tables), width, dtype=torch.int32, device=device)
        self._tables = tables
        self._known: list[list[int]] = [[] for _ in tables]  # the tables in `tensor`

    def update(self, slots: Iterable[int]) -> int:
        """Makes the rows of these slots equal to their tables. Returns the number of entries that were sent."""
        places, values, width = [], [], self.tensor.shape[1]
        for slot in slots:
            own, known = self._tables[slot], self._known[slot]
            if own != known:
                start = len(known) if own[: len(known)] == known else 0
                places += range(slot * width + start, slot * width + len(own))
                values += own[start:]
                self._known[slot] = own.copy()
        if places:
            at, blocks = sent([places, values], dtype=torch.int64, device=self.tensor.device)
            self.tensor.view(-1).index_copy_(0, at, blocks.to(torch.int32))
        return len(places)


def sent(numbers: list, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of numbers on the device. For a GPU it is made in page-locked memory, so that the host does not wait for the copy."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


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
        swap: SwapFile | None = None,
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
        """The tables of the spans have blocks for all of their positions."""
        positions, places = [], []
        for span in spans:
            table = self.tables[span.slot]
            for position in range(span.start, span.start + span.length):
                positions.append(position)
                places.append(table[position // BLOCK] * BLOCK + position % BLOCK)
        slots = [span.slot for span in spans]
        self.on_device.update(slots)
        tiles = make_tiles([(span.slot, span.start, span.length, span.row) for span in spans], group=self._group)
        return BlockStep(
            cache=self,
            positions=sent(positions, dtype=torch.int64, device=self.device),
            places=sent(places, dtype=torch.int64, device=self.device),
            tables=self.on_device.tensor[:, : max(len(self.tables[slot]) for slot in slots)],
            tiles=sent(tiles, dtype=torch.int32, device=self.device),
            split=all(span.length == 1 for span in spans),
        )

    def recompute(self, slot: int, *, tokens: list[int]) -> list[int]:
        """Recomputes keys and values in place: a block that other sequences share gets the same numbers again."""
        return tokens[: len(self.tables[slot]) * BLOCK]

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copies blocks: (source, target) each."""
        self._note("copy", pairs)
        flat = self._store.view(self.blocks, -1)
        copy_blocks(flat, torch.tensor(pairs, dtype=torch.int64).to(self.device))

    def save(self, blocks: list[int]) -> list[int]:
        """Copies blocks elsewhere, until `drop`, and returns a number for each copy. Raises DiskError as `SwapFile`."""
        handles = self.swap.write([self._bytes(block) for block in blocks])
        numbers = list(range(self._saved, self._saved + len(blocks)))
        self._saved += len(blocks)
        self._copies.update(zip(numbers, handles, strict=True))
        self._note("save", blocks)
        return numbers

    def restore(self, copies: list[int], *, blocks: list[int]) -> None:
        """Copies blocks from `save` into other blocks. Raises DiskError as `SwapFile`."""
        self._note("restore", copies, blocks=blocks)
        self.swap.read([self._copies[number] for number in copies], into=[self._bytes(block) for block in blocks])

    def drop(self, copies: list[int]) -> None:
        """Frees copies from `save`."""
        self._note("drop", copies)
        self.swap.free([self._copies.pop(number) for number in copies])

    def close(self) -> None:
        self.swap.close()

    def take_log(self, spans: list[Span]) -> list[Change]:
        """Includes the changes of the tables of these sequences."""
        for span in spans:
            own, told = self.tables[span.slot], self._told[span.slot]
            if own != told:  # a sequence that continues has new blocks alone
                start = len(told) if own[: len(told)] == told else 0
                self._note("place", span.slot, start=start, blocks=own[start:])
                self._told[span.slot] = own.copy()
        return super().take_log(spans)

    def place(self, slot: int, *, start: int, blocks: list[int]) -> None:
        """Sets the blocks of a slot's table from `start` on."""
        self.tables[slot][start:] = blocks

    def _bytes(self, block: int) -> Tensor:
        return self._store[block].view(-1).view(torch.uint8)


def block_bytes(description: Description, *, dtype: torch.dtype) -> int:
    """Bytes of a block of all layers."""
    return description.layers * 2 * description.kv_heads * BLOCK * description.head_dim * dtype.itemsize
