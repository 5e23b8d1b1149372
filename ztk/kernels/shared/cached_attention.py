"""Attention over a cache of blocks on the CPU, with sums whose order depends only on positions.

A sequence's blocks that follow each other in the cache (a run) are read as they are: products take views of the cache, and nothing is
gathered. Rows of several sequences share a call wherever their shapes are equal.

[Note: Exactness]
A sequence's logits must not depend on the rest of the step: other sequences, the chunks of its prompt, drafts. A matrix product of a
library may sum in another order when it has another number of rows. So here
- every product has one shape: a tile of query rows (a query's row follows from its absolute position) times `BLOCK` keys; a query without
  neighbours uses a narrower one if this processor gives both the same bits (tested by `lone_tile_of`); the number of products in a call,
  of the blocks of one sequence or of one block of many, changes none of them;
- keys are summed in blocks of 64 from position 0 on, and the blocks' results are added in order, sums of weights in double precision;
- the maximum that is subtracted before exp is over all keys of the query: exact in any order.
Missing and invisible keys are masked and add exactly nothing; missing rows are copies, and are not read. The linear
layers of the inference engine ensure the same, see `ztk.inference.products`.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ztk.kernels.shared.cpu_rows import constant

BLOCK = 64  # keys that are summed at once
QUERIES = 2 * BLOCK  # queries of sequences with one row each whose scores over all their keys exist at one time
_LARGE = BLOCK // 2  # places of a sequence that share products, however many keys they have
_SCORES = 8 * BLOCK  # places times blocks of keys: short sequences are batched up to it
_ROWS = 8  # query rows of a product, at least
_LONE_ROWS = 4  # of a query without neighbours, where that changes no bit
_BATCHES, _MOST = (1, 2, 4, 33), 130  # numbers of products in one call that are compared, and the reference
_FEW = 1024  # elements of a block up to which one operation for all blocks is faster, 23 us in place of 90; at 16,384 it is ten times slower
_KEPT = 4  # groups of tiles whose views are kept from step to step
# (products in one call, tiles of each) whose rows must equal single tiles
_JOINED = ((1, 2), (4, 5), (33, 9), (5, 32), (2, 1), (130, 3), (3, 64))


def tile_of(group: int) -> int:
    """Positions whose queries share a product, for `group` query heads per key head: 1, 2, 4 or 8. Its rows are a multiple of 4: with two
    threads MKL gives a product of 5, 6, 7, 9, 10 or 11 rows other bits alone than among others, as with one key head and 5 query heads."""
    return max(1, _ROWS // group, 4 // math.gcd(group, 4))


def lone_tile_of(group: int, *, head_dim: int, kv_heads: int) -> int:
    """Positions in the product of a query without neighbours. Fewer than a tile's if rows have the same bits in both.

    Most rows that a decoding step multiplies are copies of its queries. fp32, one core of an EPYC with AVX512, 32 sequences, 4 heads of 64,
    microseconds for 8 / 4 / 2 rows per head: 195 / 152 / 134; 2 rows and 1 have other bits there.
    """
    return _lone_tile(group, head_dim, kv_heads == 1, torch.get_num_threads())


def differing_tile(group: int, *, head_dim: int, kv_heads: int) -> int | None:
    """The number of products in one call for which a tile's rows have other bits than for many. None if all tested numbers agree."""
    counts = _counts(kv_heads == 1)
    for x, other in _trials(group, tile=tile_of(group), head_dim=head_dim):
        full = torch.bmm(x, other)
        for count in counts:
            if not torch.equal(torch.bmm(x[:count], other[:count]), full[:count]):
                return count
    return None


@functools.cache
@torch.inference_mode()
def _lone_tile(group: int, head_dim: int, has_lone: bool, threads: int) -> int:
    """The smallest tile for a single query whose products have a full tile's bits. has_lone: a call may have only one product. threads: part
    of the cache's key, because a library may divide products by threads."""
    tile, narrow = tile_of(group), -(-_LONE_ROWS // group)
    if narrow >= tile:
        return tile
    for x, other in _trials(group, tile=tile, head_dim=head_dim):
        full = torch.bmm(x, other).view(len(x), group, tile, -1)
        for place in range(tile):
            copies = x.unflatten(1, (group, tile))[:, :, place : place + 1].repeat(1, 1, narrow, 1).flatten(1, 2)
            for count in (*_counts(has_lone), len(x)):
                found = torch.bmm(copies[:count], other[:count]).view(count, group, narrow, -1)
                if not torch.equal(found, full[:count, :, place : place + 1].expand_as(found)):
                    return tile
    return narrow


@functools.cache
@torch.inference_mode()
def rows_agree(group: int, *, head_dim: int, threads: int) -> bool:
    """Whether a product of many tiles with a block of keys or values gives every row the bits that it has in a product of its own tile, also
    where the product is added to its result's memory.

    threads: torch's, by which a library may divide a product.
    """
    generator, rows = torch.Generator().manual_seed(0), tile_of(group) * group
    for count, tiles in _JOINED:
        for columns in (head_dim, BLOCK):
            x = torch.randn(count, tiles * rows, columns, generator=generator)
            other = torch.randn(count, BLOCK, head_dim, generator=generator)
            other = other.mT if columns == head_dim else other
            expected = torch.cat([torch.bmm(part.contiguous(), other) for part in x.split(rows, dim=1)], dim=1)
            if not torch.equal(torch.bmm(x, other), expected):
                return False
            before = torch.randn(expected.shape, generator=generator)
            if not torch.equal(torch.baddbmm(before, x, other), before + expected):
                return False
    return True


def _counts(has_lone: bool) -> tuple[int, ...]:
    return _BATCHES if has_lone else _BATCHES[1:]


def _trials(group: int, *, tile: int, head_dim: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Operands of many products: queries [P, G T, D] and keys, weights [P, G T, BLOCK] and values."""
    generator = torch.Generator().manual_seed(0)
    for columns, others in ((head_dim, BLOCK), (BLOCK, head_dim)):
        x = torch.randn(_MOST, group * tile, columns, generator=generator)
        other = torch.randn(_MOST, others, columns, generator=generator).mT
        yield x, other.contiguous() if columns == BLOCK else other


T = TypeVar("T")
Runs = tuple[
    tuple[int, int, int], ...
]  # first block of a sequence, the same block in the cache, and how many follow each other


class Rows(NamedTuple):
    """Rows `row` to `row + length` of a step are at positions from `start` on of a sequence with these blocks, in order."""

    blocks: tuple[int, ...]
    start: int
    length: int
    row: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Q tiles of `tile` consecutive positions, the first of which is a multiple of `tile`.

    rows: int64 [Q, tile], the step's row at each place, or any row if there is none, or a slice of as many consecutive rows. With lines
    int64 [Q], or a slice of Q consecutive rows, each at all places of its own tile. runs, blocks: per tile, the runs of blocks of keys that
    it reads, and their number. firsts: int64 [Q], absolute position of the first place. lines: int64 [Q], the only place that counts,
    or None if all do. targets, sources: int64, rows of the step, and the places in Q * tile (in Q, with lines) whose results they take. If
    sources is None, the targets are all of them, in order.
    stride: distance in the cache between the first blocks of neighbouring tiles, each of which reads one run of as many blocks, so that one
    product multiplies a block of all of them; 0 if they lie elsewhere. any_place: with lines, every place of a tile has the same bits.
    one_sequence: all tiles are of one sequence and read as many blocks, and one product multiplies a block of keys with all of them.
    """

    tile: int
    rows: Tensor | slice
    runs: tuple[Runs, ...]
    blocks: tuple[int, ...]
    firsts: Tensor
    lines: Tensor | None
    targets: Tensor | slice
    sources: Tensor | None
    stride: int = 0
    any_place: bool = False
    one_sequence: bool = False
    _hidden: dict = field(default_factory=dict)
    _lines: dict = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Rows of the step whose results are computed."""
        at = self.targets
        return at.stop - at.start if isinstance(at, slice) else len(at)

    @property
    def positions(self) -> Tensor:
        """int64 [Q, places that count]."""
        if self.lines is None:
            return self.firsts.unsqueeze(1) + torch.arange(self.tile)
        return (self.firsts + self.lines).unsqueeze(1)

    def hidden(self, *, window: int | None) -> tuple[int, Tensor]:
        """The first block with a masked key, and the masked keys from it on: bool [Q, blocks, 1, 1, places, BLOCK]. window: number of keys
        that a query attends to, including itself."""
        if window not in self._hidden:
            first = int(self.positions.min()) // BLOCK if window is None else 0
            key_at = torch.arange(first * BLOCK, max(self.blocks) * BLOCK).view(1, -1, 1, 1, 1, BLOCK)
            query_at = self.positions.view(len(self.runs), 1, 1, 1, -1, 1)
            found = key_at > query_at
            self._hidden[window] = first, found if window is None else found | (key_at <= query_at - window)
        return self._hidden[window]

    def queries(self, query: Tensor, *, kv_heads: int) -> Tensor:
        """The rows of query [M, H, D] at each place: [Q, K, G, tile, D]."""
        Q, (_, H, D) = len(self.runs), query.shape
        if self.lines is not None:
            return query[self.rows].view(Q, kv_heads, H // kv_heads, 1, D).expand(-1, -1, -1, self.tile, -1)
        return query[self.rows].view(Q, self.tile, kv_heads, H // kv_heads, D).permute(0, 2, 3, 1, 4)

    def counted(self, results: Tensor) -> Tensor:
        """The places that count in results [Q, N, K, G, tile, X]: [Q, N, K, G, places, X]."""
        if self.lines is None or self.tile == 1:
            return results
        if self.any_place:
            return results[..., :1, :]
        Q, *sizes, tile, X = results.shape
        each = math.prod(sizes)
        if each not in self._lines:
            starts = torch.arange(0, Q * each * tile, tile).view(Q, each)
            self._lines[each] = (starts + self.lines.unsqueeze(1)).view(-1)
        return results.view(-1, X).index_select(0, self._lines[each]).view(Q, *sizes, 1, X)


class Scratch:
    """Memory that attention over one cache computes in, one group of tiles after the other, and views of it and of the cache that a step
    has in common with the step before. For one thread. A step has its own by `begun`, with results that all of its layers share."""

    def __init__(self) -> None:
        self._flat: dict[str, Tensor] = {}
        self._kept: dict[tuple, _Memory] = {}
        self._shared: dict[tuple, Any] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the memory."""
        return sum(flat.nbytes for flat in self._flat.values())

    def begun(self) -> "Scratch":
        """The same memory for a new step."""
        found = Scratch()
        found._flat, found._kept = self._flat, self._kept
        return found

    def once(self, *key: object, make: Callable[[], T]) -> T:
        """The result of `make`, which is called once in a step for each key."""
        found = self._shared.get(key)
        if found is None:
            found = self._shared[key] = make()
        return found

    def take(self, name: str, *, shape: tuple[int, ...]) -> Tensor:
        """Memory under this name, fp32 of `shape`, with undefined content; shared by all callers with the same name."""
        numel = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.numel() < numel:
            self._kept.clear()
            flat = self._flat[name] = torch.empty(numel)
        return flat[:numel].view(shape)

    def memory(self, tiles: Tiles, *, kv_heads: int, group: int, head_dim: int) -> "_Memory":
        """Memory for one group of tiles."""
        sizes = (kv_heads, group, head_dim)
        if tiles.lines is None:
            return _Memory(tiles, sizes=sizes, scratch=self)
        key = (tiles.runs, tiles.blocks, tiles.tile, tiles.stride, sizes)
        found = self._kept.get(key)
        if found is None:
            found = _Memory(tiles, sizes=sizes, scratch=self)
            if len(self._kept) >= _KEPT:
                self._kept.clear()
            self._kept[key] = found
        return found


class _Memory:
    """fp32: queries [Q, N, K, G, T, D], scores and weights [Q, N, K, G, T, BLOCK], and results of each block [Q, N, K, G, T, D].

    Queries and weights share memory, unless the weights are computed in the scores' memory, when all places count. For tiles at a stride
    queries are [Q, 1, K, G, T, D], and N and K come first in memory: a product takes one block of one head of all sequences. Over 32
    sequences of one block, 4 heads of 64, microseconds for both products on one core / two: 209 / 139, and one call per sequence 266 / 394.
    Tiles of one sequence have the same layout, and a product takes one block of all heads; each block adds to one result.
    """

    def __init__(self, tiles: Tiles, *, sizes: tuple[int, int, int], scratch: Scratch) -> None:
        K, G, D = sizes
        self._tiles, self._rows = tiles, G * tiles.tile
        self._blocks_first = bool(tiles.stride) or tiles.one_sequence
        self._sizes = (len(tiles.runs), max(tiles.blocks), K, G, tiles.tile)
        is_copied = tiles.lines is not None and tiles.tile > 1
        if tiles.one_sequence:
            Q, _, *rows = self._sizes
            self.queries = scratch.take("queries", shape=(1, rows[0], Q, *rows[1:], D)).permute(2, 0, 1, 3, 4, 5)
        else:
            scratch.take("queries", shape=(*self._sizes, max(D, BLOCK)))
            self.queries = self._take("queries", columns=D, scratch=scratch)
        if tiles.stride:
            self.queries = self.queries[:, :1]
        self.scores = self._take("scores", columns=BLOCK, scratch=scratch)
        self.weights = self._take("queries", columns=BLOCK, scratch=scratch) if is_copied else self.scores
        self.parts = self._take("parts", columns=D, scratch=scratch, only_first=tiles.one_sequence)
        self._products: dict[int, tuple] = {}

    def _take(self, name: str, *, columns: int, scratch: Scratch, only_first: bool = False) -> Tensor:
        Q, N, K, *rows = self._sizes
        N = 1 if only_first else N
        if self._blocks_first:
            return scratch.take(name, shape=(N, K, Q, *rows, columns)).permute(2, 0, 1, 3, 4, 5)
        return scratch.take(name, shape=(Q, N, K, *rows, columns))

    def products(self, keys: Tensor, *, values: Tensor) -> tuple[list[tuple], list[tuple]]:
        """(left, right, out) of the products with keys and with values."""
        found = self._products.get(keys.data_ptr())
        if found is None:
            cut = self._by_block if self._tiles.one_sequence else self._by_head if self._blocks_first else self._by_tile
            first = list(cut(self.queries, keys.mT, self.scores))
            second = list(cut(self.weights, values, self.parts))
            # With the keys themselves, so that no other tensor has their address.
            found = self._products[keys.data_ptr()] = (first, second, keys)
        return found[0], found[1]

    def _by_tile(self, left: Tensor, cache: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """[blocks of a run x K, G T or BLOCK, X] of each tile."""
        for q, runs in enumerate(self._tiles.runs):
            for first, block, count in runs:
                own = (part[q, first : first + count].view(-1, self._rows, part.shape[-1]) for part in (left, out))
                yield next(own), cache[block : block + count].flatten(0, 1), next(own)

    def _by_head(self, left: Tensor, cache: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """[Q, G T or BLOCK, X] of each block and head."""
        (Q, N, K, *_), stride = self._sizes, self._tiles.stride
        ((_, first, _),) = self._tiles.runs[0]
        for n in range(N):
            blocks = cache[first + n : first + n + (Q - 1) * stride + 1 : stride]
            for k in range(K):
                rows = left[:, n if left.shape[1] > 1 else 0, k].flatten(1, 2)
                yield rows, blocks[:, k], out[:, n, k].flatten(1, 2)

    def _by_block(self, left: Tensor, cache: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """[K, rows of all tiles, X] of each block."""
        rows, found = (itertools.cycle(x.permute(1, 2, 0, 3, 4, 5).flatten(2, 4).unbind()) for x in (left, out))
        blocks = [block + n for _, block, count in self._tiles.runs[0] for n in range(count)]
        yield from zip(rows, (cache[block] for block in blocks), found, strict=False)

    def clear_unread(self) -> None:
        """Zeros the results of blocks that a tile does not read."""
        if min(self._tiles.blocks) < self._sizes[1] and not self._tiles.stride:
            self.parts.zero_()


def attend(
    query: Tensor,
    *,
    tiles: Tiles,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    slopes: Tensor | None = None,
    scratch: Scratch | None = None,
) -> Tensor:
    """softmax(scale query key^T) value over each query's past: query [M, H, D] -> fp32 [targets of the tiles, H, D].

    keys and values: fp32 [blocks, K, BLOCK, D], including all rows of the step; finite, also where nothing was
    written yet. window: number of keys that a query attends to,
    including itself. softcap: scores become c tanh(score / c). slopes [H]: ALiBi, slope times the key's position is added.
    """
    (_, H, D), K = query.shape, keys.shape[1]
    G, N = H // K, max(tiles.blocks)
    memory = (scratch or Scratch()).memory(tiles, kv_heads=K, group=G, head_dim=D)
    with_keys, with_values = memory.products(keys, values=values)

    torch.mul(
        tiles.queries(query, kv_heads=K).unsqueeze(1).expand_as(memory.queries), constant(scale), out=memory.queries
    )
    for left, right, out in with_keys:
        torch.bmm(left, right, out=out)
    scores = tiles.counted(memory.scores)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if slopes is not None:
        scores = scores + slopes.view(K, G, 1, 1) * torch.arange(N * BLOCK).view(N, 1, 1, 1, BLOCK)
    first, hidden = tiles.hidden(window=window)
    scores[:, first:].masked_fill_(hidden, float("-inf"))
    highest = (scores if N == 1 else scores.amax(dim=1, keepdim=True)).amax(dim=-1, keepdim=True)
    weights = scores.sub_(highest).exp_()
    total = _in_order(weights.sum(-1, keepdim=True))  # [Q, K, G, places, 1]

    if weights.data_ptr() != memory.weights.data_ptr():
        memory.weights.copy_(weights.expand_as(memory.weights))
    memory.clear_unread()
    for number, (left, right, out) in enumerate(with_values):
        if tiles.one_sequence and number:
            out.baddbmm_(left, right)
        else:
            torch.bmm(left, right, out=out)
    summed, *others = tiles.counted(memory.parts).unbind(1)  # [Q, K, G, places, D]
    for other in others:
        summed += other
    summed = torch.div(summed, total, out=torch.empty(summed.shape))
    if tiles.lines is None:
        summed = summed.permute(0, 3, 1, 2, 4).contiguous()
    rows = summed.view(-1, H, D)
    return rows if tiles.sources is None else rows[tiles.sources]


def _in_order(parts: Tensor) -> Tensor:
    """The sum over blocks: [Q, N, ...] -> [Q, ...], one after the other, in double precision."""
    if parts.shape[1] == 1:
        return parts[:, 0]
    if parts.numel() <= _FEW * parts.shape[1]:
        return parts.cumsum(1, dtype=torch.float64)[:, -1].float()
    first, *others = parts.unbind(1)
    total = first.double()
    for part in others:
        total += part
    return total.float()


# The groups of tiles of a step.


def planned(rows: list[Rows], *, total: int, kv_heads: int, group: int, head_dim: int) -> list[Tiles]:
    """The groups of tiles of a step's rows, for `group` query heads per key head. total: blocks of the cache."""
    lone = lone_tile_of(group, head_dim=head_dim, kv_heads=kv_heads)
    single = sorted((own for own in rows if own.length == 1), key=lambda own: own.blocks[0])
    any_place, most = lone < tile_of(group) or lone == 1, max(1, QUERIES // lone)
    found = [
        _single(single[first : first + most], tile=lone, any_place=any_place, total=total)
        for first in range(0, len(single), most)
    ]
    joins = rows_agree(group, head_dim=head_dim, threads=torch.get_num_threads())
    return found + _many([own for own in rows if own.length > 1], tile=tile_of(group), joins=joins)


def attention_bytes(*, heads: int, kv_heads: int, head_dim: int, sequences: int) -> tuple[int, int]:
    """Bytes of `Scratch` after steps of up to `sequences` sequences: per token of the longest one, and for batches of short ones.

    These are queries, scores, and results of each block, of as many places as one call of `attend` has.
    """
    group, D = heads // kv_heads, head_dim
    single = min(sequences * lone_tile_of(group, head_dim=D, kv_heads=kv_heads), QUERIES)
    joins = rows_agree(group, head_dim=D, threads=torch.get_num_threads())
    copied = max(single, _LARGE if joins else BLOCK)  # joined tiles have queries and results of one block
    copies = max(D, BLOCK) + D
    token = 4 * heads * (copied * copies + max(single, BLOCK) * BLOCK) // BLOCK
    return token, 4 * heads * _SCORES * (copies + BLOCK)


def _single(spans: list[Rows], *, tile: int, any_place: bool, total: int) -> Tiles:
    """Sequences with one row each, in the order of their first blocks. tile: places of each one's product, all of which have its row.
    any_place: all have its bits, too."""
    blocks = [_blocks(span.start + 1) for span in spans]
    runs = [_runs(span.blocks[:count]) for span, count in zip(spans, blocks, strict=True)]
    stride = math.gcd(*(span.blocks[0] - spans[0].blocks[0] for span in spans))
    # Also computes blocks that no sequence needs, but no more than there are needed ones.
    are_apart = all(len(own) == 1 for own in runs) and len({span.blocks[0] for span in spans}) == len(spans)
    if any_place and are_apart and stride >= max(blocks) < len(spans):
        count = (spans[-1].blocks[0] - spans[0].blocks[0]) // stride + 1
        fits = spans[-1].blocks[0] + max(blocks) <= total and count * tile <= QUERIES
        if fits and count * max(blocks) <= 2 * sum(blocks):
            return _at_stride(spans, tile=tile, blocks=max(blocks), stride=stride)
    rows = [span.row for span in spans]
    lines = [0 if any_place else span.start % tile for span in spans]
    return _tiles(
        rows,
        targets=rows,
        sources=list(range(len(rows))),
        tile=tile,
        runs=tuple(runs),
        blocks=tuple(blocks),
        firsts=torch.tensor([span.start - line for span, line in zip(spans, lines, strict=True)]),
        lines=torch.tensor(lines),
        any_place=any_place,
    )


def _at_stride(spans: list[Rows], *, tile: int, blocks: int, stride: int) -> Tiles:
    """One row of each sequence; places between them get unused copies of the first row."""
    first, rows = spans[0].blocks[0], [span.row for span in spans]
    sources = [(span.blocks[0] - first) // stride for span in spans]
    count = sources[-1] + 1
    starts, every = [0] * count, [rows[0]] * count
    for span, source in zip(spans, sources, strict=True):
        starts[source], every[source] = span.start, span.row
    return _tiles(
        every,
        targets=rows,
        sources=sources,
        tile=tile,
        runs=tuple(((0, first + number * stride, blocks),) for number in range(count)),
        blocks=(blocks,) * count,
        firsts=torch.tensor(starts),
        lines=torch.zeros(count, dtype=torch.int64),
        stride=stride,
        any_place=True,
    )


def _runs(blocks: tuple[int, ...]) -> Runs:
    """The runs of blocks that follow each other."""
    found: list[tuple[int, int, int]] = []
    for number, block in enumerate(blocks):
        if found and block == found[-1][1] + found[-1][2]:
            found[-1] = (*found[-1][:2], found[-1][2] + 1)
        else:
            found.append((number, block, 1))
    return tuple(found)


def _tiles(rows: list, *, targets: list[int], sources: list[int], tile: int, **shared: Any) -> Tiles:
    """`Tiles`, with slices where every place counts and the targets follow each other."""
    each = tile if shared["lines"] is None else 1
    if len(sources) == len(rows) * each and targets == list(range(targets[0], targets[0] + len(targets))):
        consecutive = slice(targets[0], targets[0] + len(targets))
        return Tiles(tile=tile, rows=consecutive, targets=consecutive, sources=None, **shared)
    at = {"rows": torch.tensor(rows), "targets": torch.tensor(targets), "sources": torch.tensor(sources)}
    return Tiles(tile=tile, **at, **shared)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """Places of one sequence, from `first` on, whose tiles are computed together. stop: end of the sequence's rows."""

    span: Rows
    first: int
    tiles: int
    stop: int

    def blocks(self, *, tile: int) -> int:
        return _blocks(min(self.first + self.tiles * tile, self.stop))


def _many(spans: list[Rows], *, tile: int, joins: bool) -> list[Tiles]:
    """Sequences with several rows each, at most `BLOCK` places of one at a time, which read as many blocks of keys. Batches sequences until
    `_SCORES` is full.

    joins: whether the tiles of a sequence may share products with a block of keys; they do if that makes fewer products, or large ones.
    """
    found: list[Tiles] = []
    together: list[_Piece] = []
    for span in spans:
        stop = span.start + span.length
        for border in range(span.start // BLOCK * BLOCK, stop, BLOCK):
            first = max(border, span.start // tile * tile)
            tiles = -(-(min(border + BLOCK, stop) - first) // tile)
            piece = _Piece(span=span, first=first, tiles=tiles, stop=stop)
            if joins and piece.tiles > min(piece.blocks(tile=tile), _LARGE // tile):
                found.append(_joined([piece], tile=tile, one_sequence=True))
                continue
            most = max(one.blocks(tile=tile) for one in (*together, piece))
            if together and sum(one.tiles for one in (*together, piece)) * tile * most > _SCORES:
                found.append(_joined(together, tile=tile))
                together = []
            together.append(piece)
    return [*found, _joined(together, tile=tile)] if together else found


def _joined(pieces: list[_Piece], *, tile: int, one_sequence: bool = False) -> Tiles:
    """The tiles of all pieces, one piece after the other. one_sequence: there is one piece."""
    firsts, rows, runs, blocks, targets, sources = [], [], [], [], [], []
    for piece in pieces:
        span, row = piece.span, piece.span.row - piece.span.start
        for first in range(piece.first, piece.first + piece.tiles * tile, tile):
            places = range(first, first + tile)
            counted = [at for at in places if span.start <= at < piece.stop]
            firsts.append(first)
            blocks.append(_blocks(min(first + tile, piece.stop)))
            runs.append(_runs(span.blocks[: blocks[-1]]))
            targets += [row + at for at in counted]
            sources += [len(rows) * tile + at - first for at in counted]
            rows.append([row + min(max(at, span.start), piece.stop - 1) for at in places])
    return _tiles(
        rows,
        targets=targets,
        sources=sources,
        tile=tile,
        runs=tuple(runs),
        blocks=tuple(blocks),
        firsts=torch.tensor(firsts),
        lines=None,
        one_sequence=one_sequence,
    )


def _blocks(positions: int) -> int:
    return -(-positions // BLOCK)
