"""Keys and values of running sequences: blocks of 64 positions, a table of blocks per sequence, and copies of blocks elsewhere.

[Note: Blocks in a row] A CPU reads blocks that follow each other in one piece, and gathers nothing. So there each layer has its blocks next to
each other, and `ztk.inference.slots` gives a sequence that grows alone blocks that follow each other. A GPU finds each block by the table, and
has a block of all layers next to each other, so that it moves in one piece. Memory is zeros that take no memory before they are written.

Ranks that share a model keep equal caches: the leader's cache logs its changes, and the other ranks repeat the log.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from mmap import mmap
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ztk.inference.block_swap import MainMemory, SwapFile
from ztk.inference.describe import Description
from ztk.kernels import cache_rows, copy_blocks, make_tiles, paged_attention
from ztk.kernels.shared.cached_attention import BLOCK, Scratch

Change = tuple[str, tuple, dict]  # a method of a cache, and its arguments


class Span(NamedTuple):
    """Rows `row` to `row + length` are tokens of the sequence in `slot` at positions from `start` on. adapter: its number; 0 is the base."""

    slot: int
    start: int
    length: int
    row: int
    adapter: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """Attention of layer `layer`. window: number of keys that a query attends to, including itself, or None for all before it. softcap:
    scores become c tanh(score / c). slopes [H]: ALiBi's. table: rotary, (cosine, sine) [positions, R / 2] each. eps: added in norms over each
    head."""

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    slopes: Tensor | None = None
    table: tuple[Tensor, Tensor] | None = None
    eps: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A step's M rows: positions int64 [M]; places int64 [M], block times 64 plus position in it, -1 for padding; tables int32 [slots,
    blocks of the longest]; tiles int32 [Q, 5], see `ztk.kernels.paged_attention`. split: every sequence has one row, so segments are
    computed in parallel. scratch: this step's, on a CPU."""

    cache: "Cache"
    positions: Tensor
    places: Tensor
    tables: Tensor
    tiles: Tensor
    split: bool
    scratch: Scratch | None = None

    def attend(self, rows: Tensor, *, by: Attention, norms: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Normalises and rotates queries and keys, writes keys and values into the cache, and attends over each row's past.

        rows: queries, keys and values [M, (H + 2 K) D]; norms: weights [D] over each head of queries and of keys. Returns [M, H D].
        """
        cache, (cos, sin), own = self.cache, by.table or (None, None), norms or (None, None)
        keys, values, scales = cache.keys[by.layer], cache.values[by.layer], cache.scales_of(by.layer)
        places = (self.positions, self.places)
        query = cache_rows(rows, *own, cos, sin, *places, keys, values, scales, eps=by.eps, scratch=self.scratch)
        how = {"scale": by.scale, "window": by.window or 0, "softcap": by.softcap or 0.0, "split": self.split}
        where = (keys, values, self.tables, self.tiles, by.slopes, scales)
        return paged_attention(query, *where, **how, scratch=self.scratch).flatten(1)


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


def lazy_zeros(shape: tuple[int, ...], *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros of any shape on the CPU, whose pages take memory when they are written: most answers are shorter than they may be."""
    if not (count := prod(shape)):
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(mmap(-1, dtype.itemsize * count), dtype=dtype).view(shape)


class Cache:
    """keys and values: one tensor [blocks, K, 64, D] per layer. tables: per slot, its blocks in order, `width` at most; on_device: copies
    of them.

    dtype: the dtype of keys and values. uint8 holds fp8 (e4m3), with `scales` fp32 [layers, 2, K] or None: see [Note: Scales of an fp8
    cache] in ztk/inference/memory.py.
    swap: store for copies of preempted sequences' blocks. scratch: memory for attention on a CPU.
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
        self._group = description.heads // description.kv_heads
        layers, rest = (description.layers, 2), (description.kv_heads, BLOCK, description.head_dim)
        if device.type == "cpu":
            self._store = lazy_zeros((*layers, blocks, *rest), dtype=dtype).permute(2, 0, 1, 3, 4, 5)
        else:
            self._store = torch.empty((blocks, *layers, *rest), dtype=dtype, device=device)
        # Threads write to it, outside of the inference mode in which a step is computed.
        self._in_bytes = self._store.view(blocks, -1).view(torch.uint8) if self._store.is_contiguous() else None
        self.keys, self.values = (list(self._store[:, :, part].unbind(1)) for part in (0, 1))
        self.scratch = Scratch() if device.type == "cpu" else None
        self.scales: Tensor | None = None
        self.tables: list[list[int]] = [[] for _ in range(slots)]
        self.on_device = DeviceTables(self.tables, width=width, device=device)
        self.blocks, self.device, self.dtype, self.swap = blocks, device, dtype, swap or MainMemory()
        self._copies: dict[int, Any] = {}  # by number, the same one on all ranks
        self._saved = 0  # copies so far
        self._log: list[Change] | None = None
        self._told: list[list[int]] = [[] for _ in range(slots)]  # tables as the other ranks have them

    @property
    def positions(self) -> int:
        """Capacity in positions of all sequences together."""
        return self.blocks * BLOCK

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self._store.nbytes

    def scales_of(self, layer: int) -> Tensor | None:
        """fp32 [2, K]: the factors of each head's stored keys and values."""
        return None if self.scales is None else self.scales[layer]

    def step(self, spans: list[Span]) -> Step:
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
        return Step(
            cache=self,
            positions=sent(positions, dtype=torch.int64, device=self.device),
            places=sent(places, dtype=torch.int64, device=self.device),
            tables=self.on_device.tensor[:, : max(len(self.tables[slot]) for slot in slots)],
            tiles=sent(tiles, dtype=torch.int32, device=self.device),
            split=all(span.length == 1 for span in spans),
            scratch=None if self.scratch is None else self.scratch.begun(),
        )

    def recompute(self, slot: int, *, tokens: list[int]) -> list[int]:
        """Tokens of the slot that are computed once more, in place: a block that other sequences share gets the same numbers again."""
        return tokens[: len(self.tables[slot]) * BLOCK]

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copies blocks: (source, target) each."""
        self._note("copy", pairs)
        if self._in_bytes is not None:
            copy_blocks(self._store.view(self.blocks, -1), torch.tensor(pairs, dtype=torch.int64).to(self.device))
        else:
            sources, targets = (list(part) for part in zip(*pairs, strict=True))
            self._store[targets] = self._store[sources]

    def clear(self, blocks: list[int]) -> None:
        """Zeros blocks of a sequence whose numbers are not finite: others may read places that they have not written, times zero."""
        self._note("clear", blocks)
        if blocks:
            self._store[blocks] = 0

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
        found = [self._bytes(block) for block in blocks]
        self.swap.read([self._copies[number] for number in copies], into=found)
        if self._in_bytes is None:
            for block, copy in zip(blocks, found, strict=True):
                self._store[block] = copy.view(self.dtype).view(self._store.shape[1:])

    def drop(self, copies: list[int]) -> None:
        """Frees copies from `save`."""
        self._note("drop", copies)
        self.swap.free([self._copies.pop(number) for number in copies])

    def close(self) -> None:
        """Ends the threads that move blocks. Idempotent."""
        self.swap.close()

    # Ranks

    def record(self) -> None:
        """Starts the log."""
        self._log = []

    def take_log(self, spans: list[Span]) -> list[Change]:
        """The changes since the last call, also in the tables of these sequences."""
        for span in spans:
            own, told = self.tables[span.slot], self._told[span.slot]
            if own != told:  # a sequence that continues has new blocks alone
                start = len(told) if own[: len(told)] == told else 0
                self._note("place", span.slot, start=start, blocks=own[start:])
                self._told[span.slot] = own.copy()
        log, self._log = self._log or [], []
        return log

    def repeat(self, log: list[Change]) -> None:
        """Makes the changes of the leader's `take_log`. Raises DiskError as `SwapFile`."""
        for change, values, named in log:
            getattr(self, change)(*values, **named)

    def place(self, slot: int, *, start: int, blocks: list[int]) -> None:
        """Sets the blocks of a slot's table from `start` on."""
        self.tables[slot][start:] = blocks

    def _note(self, change: str, *values: object, **named: object) -> None:
        if self._log is not None:
            self._log.append((change, values, named))

    def _bytes(self, block: int) -> Tensor:
        """uint8 [bytes]: a view, or on a CPU a copy."""
        if self._in_bytes is not None:
            return self._in_bytes[block]
        with torch.inference_mode(False):
            return self._store[block].reshape(-1).view(torch.uint8)


def block_bytes(description: Description, *, dtype: torch.dtype) -> int:
    """Bytes of a block of all layers."""
    return description.layers * 2 * description.kv_heads * BLOCK * description.head_dim * dtype.itemsize
