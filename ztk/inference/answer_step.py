"""Steps in which every answer of an `AnswerCache` gets one token, with the bits of `ztk.inference.cache_attention`.

[Note: Answers in step]
A decoding step of many short texts consists of small products and overhead. So the products of a block with all texts' queries are one
call. While answers have one block, only its first 16 or 32 keys are multiplied if no text has more. Blocks filled by a prompt are
multiplied once for all answers to it, whose queries are rows of one product, instead of once per answer. None of this changes a bit if
`equal_shapes`
holds: a row's product has the same bits among any others, skipped keys have the weight zero, the maximum over keys is exact in any
order, and sums over blocks are added in their order.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ztk.inference.cache_attention import BLOCK, tile_of
from ztk.inference.describe import Description
from ztk.inference.rows import constant
from ztk.inference.slab_cache import SlabCache
from ztk.inference.steps import Attention, RowStep

_BATCHES = (1, 4, 33, 130)  # of products that are tried
_ROWS = (4, 8, 16, 32, 64, 128, 256)
_KEYS = (16, 32)


@dataclass(frozen=True, kw_only=True, slots=True)
class EqualShapes:
    """Shapes of attention's products that give a row the same bits as in a tile on this processor, found by trial.

    On an EPYC with AVX512 (MKL) products of 4, 8, 16 and more rows agree, and products of 1 to 3 rows do not. The first 16, 32 or 48 of 64
    keys have the same bits as among all, and so do results of weights that end with zeros. Torch sums 16 and 32 weights like 64 weights that
    end with zeros, but not 48.

    rows: numbers of query rows in a product, each with the bits of a tile's, rising. keys: how many of a block's first keys may be all that
    is multiplied, rising."""

    rows: tuple[int, ...]
    keys: tuple[int, ...]

    def rows_for(self, count: int) -> int | None:
        """The smallest number of rows with room for `count`, or None if there are too many."""
        return next((rows for rows in self.rows if rows >= count), None)


def equal_shapes(group: int, *, head_dim: int) -> EqualShapes:
    """For `group` query heads per key head of `head_dim` elements; without any rows where none agrees."""
    return _equal_shapes(group, head_dim, torch.get_num_threads())


@functools.cache
@torch.inference_mode()
def _equal_shapes(group: int, head_dim: int, threads: int) -> EqualShapes:
    """threads: torch's, by which a library may divide a product."""
    tile, rows = group * tile_of(group), []
    for count in _ROWS:
        if not _agrees(count, tile=tile, head_dim=head_dim, keys=BLOCK):
            break
        rows.append(count)
    least = next((count for count in rows if count >= group), 0)  # of an answer's own blocks
    keys = [count for count in _KEYS if least and _agrees(least, tile=tile, head_dim=head_dim, keys=count)]
    return EqualShapes(rows=tuple(rows), keys=(*keys, BLOCK))


def _agrees(rows: int, *, tile: int, head_dim: int, keys: int) -> bool:
    """Whether products and sums with this number of rows and the first `keys` have a tile's bits at every place, for any other rows."""
    generator = torch.Generator().manual_seed(0)
    for batch in _BATCHES:
        query, key, value = (
            torch.randn(batch, *shape, generator=generator)
            for shape in ((tile, head_dim), (BLOCK, head_dim), (BLOCK, head_dim))
        )
        weights, at = torch.rand(batch, tile, BLOCK, generator=generator), torch.arange(rows).roll(1) % tile
        weights[:, :, keys:] = 0
        part = weights[:, at, :keys].contiguous()
        pairs = (
            (torch.bmm(query[:, at], key[:, :keys].mT), torch.bmm(query, key.mT)[:, at, :keys]),
            (torch.bmm(part, value[:, :keys]), torch.bmm(weights, value)[:, at]),
            (part[:, :1].sum(-1), weights.sum(-1)[:, at[:1]]),
        )
        if not all(torch.equal(own, full) for own, full in pairs):
            return False
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Keys, or values, of one layer. shared: full blocks of prompts, [blocks, prompts, K, BLOCK, D]; finite numbers beyond a prompt's end.

    own: the following blocks of each answer, [blocks, answers, K, BLOCK, D].
    """

    shared: Tensor
    own: Tensor


class AnswerCache:
    """Keys and values of answers that are drawn in step, several to each prompt. Blocks filled by a prompt are stored once for all of its
    answers.

    keys[layer] and values[layer] of A answers; own[layer]: their own blocks, of keys and of values, [2, blocks, A, K, BLOCK, D].

    live: number of answers that continue; they are in the first places.
    prompts: of every prompt, in the slot of its number. lengths: their tokens. prompt_of: number of each answer's prompt. longest: tokens of an
    answer at most. shares: blocks that prompts fill are stored once; else every answer has a copy.

    filled: full blocks of each prompt that are shared. blocks: of an answer's own, at most.
    """

    def __init__(
        self, prompts: SlabCache, *, lengths: Sequence[int], prompt_of: Sequence[int], longest: int, shares: bool
    ) -> None:
        self.filled = [length // BLOCK if shares else 0 for length in lengths]
        self.prompt_of, self.live = list(prompt_of), len(prompt_of)
        pairs = list(zip(lengths, self.filled, strict=True))
        self.blocks = max(-(-(length + longest) // BLOCK) - own for length, own in pairs)
        self._opened = 0
        size = (2, self.blocks, self.live, *prompts.keys[0].shape[2:])
        self.own = [prompts.keys[0].new_empty(size) for _ in prompts.keys]
        self.keys, self.values = (
            [
                Kept(shared=slab[:, : max(self.filled)].transpose(0, 1).contiguous(), own=both[which])
                for slab, both in zip(slabs, self.own, strict=True)
            ]
            for which, slabs in enumerate((prompts.keys, prompts.values))
        )
        self.open(max(-(-length // BLOCK) - own for length, own in pairs))
        for prompt, (length, filled) in enumerate(pairs):
            answers = torch.tensor([answer for answer, of in enumerate(prompt_of) if of == prompt])
            for slabs, each in ((prompts.keys, self.keys), (prompts.values, self.values)):
                for slab, kept in zip(slabs, each, strict=True):
                    for block in range(filled, -(-length // BLOCK)):
                        kept.own[block - filled, answers] = slab[prompt, block]

    def open(self, blocks: int) -> None:
        """Prepares the first `blocks` own blocks for reading. Positions after a text's end must be finite: their scores are masked, and
        zero times their values must be zero."""
        for kept in self.values:
            kept.own[self._opened : blocks].zero_()
        self._opened = max(self._opened, blocks)

    def keep(self, places: list[int]) -> None:
        """Moves the answers in `places` that are not in the first places to the places of ended answers. `places` is updated: places[n] is
        n, or a larger number, whose answer is at n from now on."""
        moved = [(source, target) for target, source in enumerate(places) if source != target]
        if moved:
            sources, targets = (torch.tensor(part) for part in zip(*moved, strict=True))
            for own in self.own:
                own.index_copy_(2, targets, own.index_select(2, sources))
        self.prompt_of = [self.prompt_of[place] for place in places]
        self.live = len(places)


class AnswerStep(RowStep):
    """Positions of the rows of a step: row n is the next token of answer n. positions: int64 [live answers].

    lengths: of the answers' prompts. `next` advances to the following token, `keep` drops answers that have ended.
    """

    def __init__(
        self, cache: AnswerCache, *, description: Description, shapes: EqualShapes, lengths: list[int]
    ) -> None:
        super().__init__()
        K, D = description.kv_heads, description.head_dim
        G = description.heads // K
        self._cache, self._shapes, self._sizes = cache, shapes, (K, G, D)
        self.positions = torch.tensor(lengths)
        self._since = 0  # tokens of every answer so far
        rows = shapes.rows_for(G)
        assert rows is not None, "the processor has been tried"
        # Rows beyond the group's are multiplied, too, and not read.
        self._queries = torch.zeros(cache.live, K, rows, D)
        self._memory = torch.zeros(cache.blocks * cache.live * K * rows * BLOCK)
        self._parts = torch.zeros(cache.blocks, cache.live, K, rows, D)
        self._lengths = lengths
        self._arrange()

    def next(self) -> None:
        """Advances every answer by one token."""
        self._since += 1
        self.positions, self._at = self.positions + 1, self._at + 1
        self._lines += 1  # but where a block begins
        if self._common is not None:
            self._common += 1
        self._place()

    def keep(self, places: list[int]) -> None:
        """As `AnswerCache.keep`, which it also calls."""
        self._cache.keep(places)
        self._lengths = [self._lengths[place] for place in places]
        self.positions = self.positions[places]
        self._arrange()

    def write(self, key: Tensor, *, value: Tensor, layer: int) -> None:
        own, (A, _, D) = self._cache.own[layer], key.shape
        if self._common is None:
            own.view(-1, D).index_copy_(0, self._lines, torch.cat([key, value], dim=1).view(-1, D))
            return
        block, place = divmod(self._common, BLOCK)
        for kept, rows in zip(own.unbind(), (key, value), strict=True):
            kept[block, :A, :, place].copy_(rows)

    def read(self, query: Tensor, *, by: Attention) -> Tensor:
        keys, values = self._cache.keys[by.layer], self._cache.values[by.layer]
        scale, window, softcap, slopes = by.scale, by.window, by.softcap, by.slopes
        (A, H, _), (K, G, D), views = query.shape, self._sizes, self._views
        torch.mul(query.view(A, K, G, D), constant(scale), out=views.counted_queries)
        for key, out in zip(views.of(keys), views.products, strict=True):
            torch.bmm(views.queries, key.mT, out=out)
        scores = views.scores
        _cap(scores, softcap=softcap)
        if slopes is not None:
            scores.add_(slopes.view(K, G, 1) * self._key_at())
        hidden = self._later
        if window is not None:
            hidden = hidden | (self._key_at() <= self.positions.view(-1, 1, 1, 1) - window)
        scores.masked_fill_(hidden, float("-inf"))
        highest = scores.amax(dim=-1, keepdim=True) if scores.shape[0] == 1 else scores.amax(dim=(0, 4), keepdim=True)

        shared = self._shared
        if shared is not None:
            shared.score(views.queries, keys=keys.shared, window=window, softcap=softcap, slopes=slopes)
            highest = torch.maximum(highest, shared.highest())
            shared.weigh(highest[0], values=values.shared)
        scores.sub_(highest).exp_()
        sums = scores.sum(-1, keepdim=True).double()
        total = _in_order(sums, first=None if shared is None else shared.total()).float()
        for value, left, out in zip(views.of(values), views.products, views.parts, strict=True):
            torch.bmm(left, value, out=out)
        summed = _in_order(views.counted_parts, first=None if shared is None else shared.summed())
        return torch.div(summed, total, out=torch.empty(summed.shape)).view(A, H, D)

    # Parts

    def _arrange(self) -> None:
        """For these answers."""
        cache, (K, G, D) = self._cache, self._sizes
        own = [cache.filled[prompt] * BLOCK for prompt in cache.prompt_of]
        self._first = torch.tensor(own)  # the position of each answer's first own key
        self._at = self.positions - self._first  # in the own blocks
        begun = [length - first for length, first in zip(self._lengths, own, strict=True)]  # own keys before the answer
        self._longest, self._room = max(begun), 0
        # Where all write, if it is at one place: copies of many rows at once take a quarter of those by row.
        self._common = begun[0] + self._since if min(begun) == max(begun) else None
        # Tokens after which some answer begins a block.
        self._ends = {tokens for length in begun for tokens in range(-length % BLOCK, cache.blocks * BLOCK, BLOCK)}
        self._shared = None
        if max(cache.filled[prompt] for prompt in cache.prompt_of):
            self._shared = _SharedBlocks(cache, rows=self._queries.shape[2], shapes=self._shapes, sizes=(K, G, D))
        self._place()

    def _place(self) -> None:
        """For these positions."""
        keys = self._longest + self._since + 1
        if keys > self._room or self._since in self._ends:
            self._move(keys)
        self._later = self._places > self._at.view(-1, 1, 1, 1)
        self._rotary.clear()
        if self._shared is not None:
            self._shared.positions = self.positions

    def _move(self, keys: int) -> None:
        """Called when some answer begins a block, or more of the first block is multiplied. keys: own ones of the longest answer."""
        cache, (K, G, _), A = self._cache, self._sizes, len(self._at)
        blocks, width = -(-keys // BLOCK), next((width for width in self._shapes.keys if width >= keys), BLOCK)
        self._room = width if blocks == 1 else blocks * BLOCK
        cache.open(blocks)
        shape = (blocks, A, K, self._queries.shape[2], width)
        scores = self._memory[: math.prod(shape)].view(shape)
        self._views = _Views(self._queries[:A], scores=scores, parts=self._parts[:blocks, :A], group=G)
        slots = cache.keys[0].own.shape[1]
        lines = (self._at // BLOCK * slots + torch.arange(A)) * (K * BLOCK) + self._at % BLOCK
        heads = torch.arange(0, K * BLOCK, BLOCK)
        every = torch.cat([heads, heads + cache.blocks * slots * K * BLOCK])  # of keys and of values
        self._lines = (lines.unsqueeze(1) + every).view(-1)
        self._places = torch.arange(blocks * width).view(blocks, 1, 1, 1, width)

    def _key_at(self) -> Tensor:
        """Positions of own keys, int64 [blocks, answers, 1, 1, keys]."""
        return self._places + self._first.view(-1, 1, 1, 1)


class _Views:
    """Parts of a step's memory and of the cache that do not change from step to step, since each view takes as long as a small operation.

    queries: [answers, K, rows, D]. scores: [blocks, answers, K, rows, keys], and `parts` likewise, results [..., D]. group: rows that count.
    """

    def __init__(self, queries: Tensor, *, scores: Tensor, parts: Tensor, group: int) -> None:
        self._answers, self._keys = scores.shape[1], scores.shape[4]
        self._cache: dict[int, tuple[Kept, list[Tensor]]] = {}
        self.queries, self.counted_queries = queries.flatten(0, 1), queries[:, :, :group]
        self.products, self.scores = [block.flatten(0, 1) for block in scores], scores[:, :, :, :group]
        self.parts, self.counted_parts = [block.flatten(0, 1) for block in parts], parts[:, :, :, :group]

    def of(self, kept: Kept) -> list[Tensor]:
        """Its own blocks that are multiplied: [answers K, keys, D] each."""
        found = self._cache.get(id(kept))
        if found is None:
            blocks = kept.own[: len(self.products), : self._answers, :, : self._keys]
            # With `kept` itself, so that no other has its id.
            found = self._cache[id(kept)] = (kept, [block.flatten(0, 1) for block in blocks])
        return found[1]


class _SharedBlocks:
    """Attention of answers over the blocks that their prompts fill. positions: int64 [answers], of their queries.

    A product has the queries of all answers to a prompt: N blocks, P prompts, R rows, of which M belong to answers and the rest are unused
    copies.
    """

    def __init__(self, cache: AnswerCache, *, rows: int, shapes: EqualShapes, sizes: tuple[int, int, int]) -> None:
        """rows: of each head of an answer in the step's queries."""
        K, G, D = sizes
        P, N = len(cache.filled), max(cache.filled)
        members: list[list[int]] = [[] for _ in range(P)]
        for answer, prompt in enumerate(cache.prompt_of):
            members[prompt].append(answer)
        R = shapes.rows_for(max(len(own) for own in members) * G)
        assert R is not None, "a cache shares blocks where this processor has such products"
        self.positions = torch.zeros(cache.live, dtype=torch.int64)
        # Of every row of a product the answer and the head of its group, and of every answer its first row.
        pairs = [[(answer, head) for answer in own for head in range(G)] for own in members]
        pairs = [[*own, *[(0, 0)] * (R - len(own))] for own in pairs]
        self._answer = torch.tensor([[answer for answer, _ in own] for own in pairs])  # [P, R]
        self._head = torch.tensor([[head for _, head in own] for own in pairs])
        first = {answer: (prompt, place * G) for prompt, own in enumerate(members) for place, answer in enumerate(own)}
        prompt, row = torch.tensor([first[answer] for answer in range(cache.live)]).view(-1, 2, 1, 1).unbind(1)
        head = torch.arange(K).view(1, K, 1)
        at = (self._answer.unsqueeze(1) * K + head.view(1, K, 1)).view(P, K, R)
        self._query_at = (at * rows + self._head.unsqueeze(1)).view(-1).repeat(N)
        self._highest_at = (at * G + self._head.unsqueeze(1)).view(-1)
        self._back = ((prompt * K + head) * R + row + torch.arange(G)).view(-1)
        missing = torch.tensor(cache.filled) <= torch.arange(N).unsqueeze(1)
        self._missing = missing.view(N, P, 1, 1, 1) if missing.any() else None
        self._sizes, self._shape = sizes, (N, P, K, R)
        self._queries, self._parts = torch.empty(N * P * K * R, D), torch.empty(N, P, K, R, D)
        self._scores = torch.empty(N, P, K, R, BLOCK)
        self._weighed: tuple[Tensor, Tensor] | None = None

    def score(
        self, query: Tensor, *, keys: Tensor, window: int | None, softcap: float | None, slopes: Tensor | None
    ) -> None:
        """query: scaled, [answers K, rows, D]. keys: [N, P, K, BLOCK, D]."""
        (N, P, K, R), (_, G, D) = self._shape, self._sizes
        torch.index_select(query.view(-1, D), 0, self._query_at, out=self._queries)
        torch.bmm(self._queries.view(-1, R, D), keys.flatten(0, 2).mT, out=self._scores.view(-1, R, BLOCK))
        _cap(self._scores, softcap=softcap)
        key_at = torch.arange(N * BLOCK).view(N, 1, 1, 1, BLOCK)
        if slopes is not None:
            own = slopes.view(1, K, G).expand(P, K, G).gather(2, self._head.unsqueeze(1).expand(P, K, R))
            self._scores.add_(own.unsqueeze(-1) * key_at)
        if window is not None:
            first = (self.positions - window)[self._answer].view(1, P, 1, R, 1)
            self._scores.masked_fill_(key_at <= first, float("-inf"))
        if self._missing is not None:
            self._scores.masked_fill_(self._missing, float("-inf"))

    def highest(self) -> Tensor:
        """The largest score of each query: [1, answers, K, G, 1]."""
        return self._by_answer(self._scores.amax(dim=(0, 4))).unsqueeze(0)

    def weigh(self, highest: Tensor, *, values: Tensor) -> None:
        """highest: over all keys, [answers, K, G, 1]. values: [N, P, K, BLOCK, D]."""
        _, P, K, R = self._shape
        self._scores.sub_(highest.reshape(-1).index_select(0, self._highest_at).view(1, P, K, R, 1)).exp_()
        torch.bmm(
            self._scores.view(-1, R, BLOCK), values.flatten(0, 2), out=self._parts.view(-1, R, self._parts.shape[-1])
        )
        sums = self._scores.sum(-1, keepdim=True).double()
        total, summed = (_in_order(part, first=None) for part in (sums, self._parts))
        self._weighed = self._by_answer(total), self._by_answer(summed)

    def total(self) -> Tensor:
        """Sums of weights, double precision [answers, K, G, 1]."""
        assert self._weighed is not None, "after `weigh`"
        return self._weighed[0]

    def summed(self) -> Tensor:
        """Sums of weighted values, [answers, K, G, D]."""
        assert self._weighed is not None, "after `weigh`"
        return self._weighed[1]

    def _by_answer(self, x: Tensor) -> Tensor:
        """[P, K, R, X] or [P, K, R] -> [answers, K, G, X or 1]."""
        K, G, _ = self._sizes
        flat = x.view(self._shape[1] * K * self._shape[3], -1)
        return flat.index_select(0, self._back).view(-1, K, G, flat.shape[1])


def _cap(scores: Tensor, *, softcap: float | None) -> None:
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)


def _in_order(parts: Tensor, *, first: Tensor | None) -> Tensor:
    """`first`, of blocks before, and the sum over blocks, one after the other: [N, ...] -> [...]. May write to the first."""
    total, others = (parts[0], parts[1:]) if first is None else (first, parts)
    for part in others:
        total += part
    return total
