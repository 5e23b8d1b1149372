"""Attention over a cache, with sums whose order depends only on positions.

[Note: Exactness]
A sequence's logits must not depend on the rest of the step: other sequences, the chunks of its prompt, drafts. A matrix product of a
library may sum in another order when it has another number of rows. So here
- every product has one shape: a tile of query rows (a query's row follows from its absolute position) times `BLOCK` keys; a query without
  neighbours uses a narrower one if this processor gives both the same bits (tested by `lone_tile_of`); the number of products in a call,
  of the blocks of one sequence or of one block of many, changes none of them;
- keys are summed in blocks of 64 from position 0 on, and the blocks' results are added in order, sums of weights in double precision;
- the maximum that is subtracted before exp is over all keys of the query: exact in any order.
Missing and invisible keys are masked and add exactly nothing; missing rows are copies, and are not read. The linear
layers ensure the same by oneDNN or by one row at a time, see `ztk.inference.products`; `ztk.inference.probe` checks this when a model
is loaded.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ztk.inference.rows import constant

BLOCK = 64  # keys that are summed at once
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Q tiles of `tile` consecutive positions, the first of which is a multiple of `tile`.

    rows: int64 [Q, tile], the step's row at each place, or any row if there is none, or a slice of as many consecutive rows. With lines
    int64 [Q], or a slice of Q consecutive rows, each at all places of its own tile. slots, blocks: per tile, the cache's slot and the number
    of blocks of keys that it reads. firsts: int64 [Q], absolute position of the first place. lines: int64 [Q], the only place that counts,
    or None if all do. targets, sources: int64, rows of the step, and the places in Q * tile (in Q, with lines) whose results they take. If
    sources is None, the targets are all of them, in order.
    side_by_side: slots are consecutive and blocks equal. any_place: with lines, every place of a tile has the same bits. one_sequence: all
    tiles are of one slot and read as many blocks, and one product multiplies a block of keys with all of them.
    """

    tile: int
    rows: Tensor | slice
    slots: tuple[int, ...]
    blocks: tuple[int, ...]
    firsts: Tensor
    lines: Tensor | None
    targets: Tensor | slice
    sources: Tensor | None
    side_by_side: bool = False
    any_place: bool = False
    one_sequence: bool = False
    _hidden: dict = field(default_factory=dict)
    _lines: dict = field(default_factory=dict)

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
            query_at = self.positions.view(len(self.slots), 1, 1, 1, -1, 1)
            found = key_at > query_at
            self._hidden[window] = first, found if window is None else found | (key_at <= query_at - window)
        return self._hidden[window]

    def queries(self, query: Tensor, *, kv_heads: int) -> Tensor:
        """The rows of query [M, H, D] at each place: [Q, K, G, tile, D]."""
        Q, (_, H, D) = len(self.slots), query.shape
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
    """Memory that `attend` computes in, one group of tiles after the other, and views of it and of a cache that a step has in common with
    the step before. For one thread."""

    def __init__(self) -> None:
        self._flat: dict[str, Tensor] = {}
        self._kept: dict[tuple, _Memory] = {}

    def forget(self) -> None:
        """Drops views of a cache whose memory is about to be replaced."""
        self._kept.clear()

    def release(self) -> None:
        """As `forget`, and frees the memory, because sequences have other lengths now."""
        self._kept.clear()
        self._flat.clear()

    def take(self, name: str, *, shape: tuple[int, ...]) -> Tensor:
        """Memory under this name, fp32 of `shape`, with undefined content; shared by all callers with the same name."""
        numel = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.numel() < numel:
            self.forget()
            flat = self._flat[name] = torch.empty(numel)
        return flat[:numel].view(shape)

    def memory(self, tiles: Tiles, *, kv_heads: int, group: int, head_dim: int) -> "_Memory":
        """Memory for one group of tiles."""
        sizes = (kv_heads, group, head_dim)
        if tiles.lines is None:
            return _Memory(tiles, sizes=sizes, scratch=self)
        key = (tiles.slots, tiles.blocks, tiles.tile, sizes)
        found = self._kept.get(key)
        if found is None:
            found = _Memory(tiles, sizes=sizes, scratch=self)
            if len(self._kept) >= _KEPT:
                self.forget()
            self._kept[key] = found
        return found


class _Memory:
    """fp32: queries [Q, N, K, G, T, D], scores and weights [Q, N, K, G, T, BLOCK], and results of each block [Q, N, K, G, T, D].

    Queries and weights share memory, unless the weights are computed in the scores' memory, when all places count. For tiles side by side
    queries are [Q, 1, K, G, T, D], and N and K come first in memory: a product takes one block of one head of all sequences. Over 32
    sequences of one block, 4 heads of 64, microseconds for both products on one core / two: 209 / 139, and one call per sequence 266 / 394.
    Tiles of one sequence have the same layout, and a product takes one block of all heads; each block adds to one result.
    """

    def __init__(self, tiles: Tiles, *, sizes: tuple[int, int, int], scratch: Scratch) -> None:
        K, G, D = sizes
        self._tiles, self._rows = tiles, G * tiles.tile
        self._blocks_first = tiles.side_by_side or tiles.one_sequence
        self._sizes = (len(tiles.slots), max(tiles.blocks), K, G, tiles.tile)
        is_copied = tiles.lines is not None and tiles.tile > 1
        if tiles.one_sequence:
            Q, _, *rows = self._sizes
            self.queries = scratch.take("queries", shape=(1, rows[0], Q, *rows[1:], D)).permute(2, 0, 1, 3, 4, 5)
        else:
            scratch.take("queries", shape=(*self._sizes, max(D, BLOCK)))
            self.queries = self._take("queries", columns=D, scratch=scratch)
        if tiles.side_by_side:
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
        found = self._products.get(id(keys))
        if found is None:
            cut = self._by_block if self._tiles.one_sequence else self._by_head if self._blocks_first else self._by_tile
            first = list(cut(self.queries, keys.mT, self.scores))
            second = list(cut(self.weights, values, self.parts))
            # With the keys themselves, so that no other tensor has their id.
            found = self._products[id(keys)] = (first, second, keys)
        return found[0], found[1]

    def _by_tile(self, left: Tensor, slab: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """[blocks that it reads x K, G T or BLOCK, X] of each tile."""
        for q, (slot, count) in enumerate(zip(self._tiles.slots, self._tiles.blocks, strict=True)):
            own = (part[q, :count].view(-1, self._rows, part.shape[-1]) for part in (left, out))
            yield next(own), slab[slot, :count].flatten(0, 1), next(own)

    def _by_head(self, left: Tensor, slab: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """[Q, G T or BLOCK, X] of each block and head."""
        Q, N, K, *_ = self._sizes
        first = self._tiles.slots[0]
        for n in range(N):
            for k in range(K):
                rows = left[:, n if left.shape[1] > 1 else 0, k].flatten(1, 2)
                yield rows, slab[first : first + Q, n, k], out[:, n, k].flatten(1, 2)

    def _by_block(self, left: Tensor, slab: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """[K, rows of all tiles, X] of each block."""
        rows, found = (itertools.cycle(x.permute(1, 2, 0, 3, 4, 5).flatten(2, 4).unbind()) for x in (left, out))
        yield from zip(rows, slab[self._tiles.slots[0], : self._sizes[1]].unbind(), found, strict=False)

    def clear_unread(self) -> None:
        """Zeros the results of blocks that a tile does not read."""
        if min(self._tiles.blocks) < self._sizes[1] and not self._tiles.side_by_side:
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

    keys and values: fp32 [slots, blocks, K, BLOCK, D], including all rows of the step. window: number of keys that a query attends to,
    including itself. softcap: scores become c tanh(score / c). slopes [H]: ALiBi, slope times the key's position is added.
    """
    (_, H, D), K = query.shape, keys.shape[2]
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
