"""Steps in which every answer of an `AnswerCache` gets one token, with the bits of `ztk.inference.attention`.

[Note: Answers in step]
A decoding step of many short texts is small products, and what is around them. So the products of a block with all texts' queries are one
call; while answers have one block, its first 16 or 32 keys are multiplied where no text has more; and blocks that a prompt fills are multiplied
once for all answers to it, whose queries are rows of one product, instead of once per answer. None of it changes a bit where `equal_shapes`
holds: a row's product has the same bits among any others, keys that are left out have the weight zero, the maximum over keys is exact in any
order, and sums over blocks are added in their order.
"""

import math

import torch
from torch import Tensor

from ztk.inference.answer_cache import AnswerCache, Kept
from ztk.inference.attention import BLOCK
from ztk.inference.describe import Description
from ztk.inference.equal_shapes import EqualShapes


class AnswerStep:
    """Where the rows of a step are: row n is the next token of answer n. positions: int64 [live answers].

    lengths: of the answers' prompts. `next` goes on to the following token, `keep` leaves out answers that have ended.
    """

    def __init__(
        self, cache: AnswerCache, *, description: Description, shapes: EqualShapes, lengths: list[int]
    ) -> None:
        K, D = description.kv_heads, description.head_dim
        G = description.heads // K
        self._cache, self._shapes, self._sizes = cache, shapes, (K, G, D)
        self.positions = torch.tensor(lengths)
        self._since = 0  # tokens of every answer so far
        self._rotary: dict[int, tuple[Tensor, Tensor]] = {}
        rows = shapes.rows_for(G)
        assert rows is not None, "the processor has been tried"
        # Rows beyond the group's are multiplied, too, and not read.
        self._queries = torch.zeros(cache.live, K, rows, D)
        self._memory = torch.zeros(cache.blocks * cache.live * K * rows * BLOCK)
        self._parts = torch.zeros(cache.blocks, cache.live, K, rows, D)
        self._lengths = lengths
        self._arrange()

    def next(self) -> None:
        """Every answer has got a token."""
        self._since += 1
        self.positions = self.positions + 1
        self._place()

    def keep(self, places: list[int]) -> None:
        """As `AnswerCache.keep`, which is called, too."""
        self._cache.keep(places)
        self._lengths = [self._lengths[place] for place in places]
        self.positions = self.positions[places]
        self._arrange()

    def rotary(self, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The rows of one of the model's rotary tables, (cosine, sine) [answers, rotary_dims / 2] each."""
        found = self._rotary.get(id(table))
        if found is None:
            cos, sin = (part.index_select(0, self.positions) for part in table)
            found = self._rotary[id(table)] = (cos, sin)
        return found

    def write(self, key: Tensor, *, value: Tensor, cache: AnswerCache, layer: int) -> None:
        """Keys and values [answers, K, D] of all rows into the cache."""
        D = key.shape[2]
        for kept, rows in ((cache.keys, key), (cache.values, value)):
            kept[layer].own.view(-1, D).index_copy_(0, self._lines, rows.reshape(-1, D))

    def attend(
        self,
        query: Tensor,
        *,
        keys: Kept,
        values: Kept,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        """As `ztk.inference.attention.attend`: query [answers, H, D] -> fp32 [answers, H, D]."""
        (A, H, _), (K, G, D) = query.shape, self._sizes
        queries = self._queries[:A]
        counted_queries = queries[:, :, :G]
        torch.mul(query.view(A, K, G, D), scale, out=counted_queries)
        by_answer, every = queries.flatten(0, 1), self._scores
        for block in range(len(every)):
            right = keys.own[block, :A, :, : every.shape[-1]].flatten(0, 1)
            torch.bmm(by_answer, right.mT, out=every[block].flatten(0, 1))
        scores = every[:, :, :, :G]  # [blocks, answers, K, G, keys]
        _cap(scores, softcap=softcap)
        if slopes is not None:
            scores.add_(slopes.view(K, G, 1) * self._key_at())
        scores.masked_fill_(self._later if window is None else self._hidden(window), float("-inf"))
        highest = scores.amax(dim=-1, keepdim=True) if len(every) == 1 else scores.amax(dim=(0, 4), keepdim=True)

        shared = None
        if self._shared is not None:
            shared = self._shared
            shared.score(counted_queries, keys=keys.shared, window=window, softcap=softcap, slopes=slopes)
            highest = torch.maximum(highest, shared.highest())
            shared.weigh(highest[0], values=values.shared)
        scores.sub_(highest).exp_()
        total = _in_order(scores.sum(-1, keepdim=True), first=None if shared is None else shared.total())
        for block in range(len(every)):
            right = values.own[block, :A, :, : every.shape[-1]].flatten(0, 1)
            torch.bmm(every[block].flatten(0, 1), right, out=self._parts[block, :A].flatten(0, 1))
        summed = _in_order(self._parts[: len(every), :A, :, :G], first=None if shared is None else shared.summed())
        return torch.div(summed, total, out=torch.empty(summed.shape)).view(A, H, D)

    # Parts

    def _arrange(self) -> None:
        """For these answers."""
        cache, (K, G, D) = self._cache, self._sizes
        own = [cache.filled[prompt] * BLOCK for prompt in cache.prompt_of]
        self._first = torch.tensor(own)  # the position of each answer's first own key
        self._longest = max(length - first for length, first in zip(self._lengths, own, strict=True))
        self._shared = None
        if max(cache.filled[prompt] for prompt in cache.prompt_of):
            self._shared = _SharedBlocks(cache, shapes=self._shapes, sizes=(K, G, D))
        self._place()

    def _place(self) -> None:
        """For these positions."""
        cache, (K, _, _) = self._cache, self._sizes
        at = self.positions - self._first  # in the own blocks
        keys = self._longest + self._since + 1
        blocks, width = -(-keys // BLOCK), next((width for width in self._shapes.keys if width >= keys), BLOCK)
        cache.open(blocks)
        shape = (blocks, len(at), K, self._queries.shape[2], width)
        self._scores = self._memory[: math.prod(shape)].view(shape)
        slots = cache.keys[0].own.shape[1]
        lines = (at // BLOCK * slots + torch.arange(len(at))) * (K * BLOCK) + at % BLOCK
        self._lines = (lines.unsqueeze(1) + torch.arange(0, K * BLOCK, BLOCK)).view(-1)
        places = torch.arange(blocks * width).view(blocks, 1, 1, 1, width)
        self._places, self._later = places, places > at.view(-1, 1, 1, 1)
        self._rotary.clear()
        if self._shared is not None:
            self._shared.positions = self.positions

    def _key_at(self) -> Tensor:
        """Positions of own keys, int64 [blocks, answers, 1, 1, keys]."""
        return self._places + self._first.view(-1, 1, 1, 1)

    def _hidden(self, window: int) -> Tensor:
        """As `_later`, with those that are too far behind."""
        return self._later | (self._key_at() <= self.positions.view(-1, 1, 1, 1) - window)


class _SharedBlocks:
    """What answers see of the blocks that their prompts fill. positions: int64 [answers], of their queries.

    Sizes: N blocks, P prompts, R rows of a product, of which the first M G are those of M answers, as many as any prompt has.
    """

    def __init__(self, cache: AnswerCache, *, shapes: EqualShapes, sizes: tuple[int, int, int]) -> None:
        K, G, D = self._sizes = sizes
        P = 1 + max(cache.prompt_of)
        members: list[list[int]] = [[] for _ in range(P)]
        for answer, prompt in enumerate(cache.prompt_of):
            members[prompt].append(answer)
        M = max(len(own) for own in members)
        rows = shapes.rows_for(M * G)
        assert rows is not None, "a cache shares blocks where this processor has such products"
        self.positions = torch.zeros(cache.live, dtype=torch.int64)
        self._tiles = torch.tensor([own + [0] * (M - len(own)) for own in members]).view(-1)
        at = {answer: prompt * M + place for prompt, own in enumerate(members) for place, answer in enumerate(own)}
        self._back = torch.tensor([at[answer] for answer in range(cache.live)])
        # Of each block the prompts that fill it: the first ones.
        self._prompts = [sum(own > block for own in cache.filled[:P]) for block in range(cache.filled[0])]
        N = len(self._prompts)
        self._queries, self._scores = torch.zeros(P, K, rows, D), torch.zeros(N, P, K, rows, BLOCK)
        self._parts = torch.zeros(N, P, K, rows, D)
        self._counted = M * G
        self._shape = (P, M, K, G)
        self._weighed: tuple[Tensor, Tensor] | None = None

    def score(
        self, query: Tensor, *, keys: list[Tensor], window: int | None, softcap: float | None, slopes: Tensor | None
    ) -> None:
        """query: [answers, K, G, D], scaled."""
        (_, M, _, G), N = self._shape, len(self._prompts)
        self._queries[:, :, : self._counted] = self._by_prompt(query)
        for block, count in enumerate(self._prompts):
            left, out = self._queries[:count].flatten(0, 1), self._scores[block, :count].flatten(0, 1)
            torch.bmm(left, keys[block][:count].flatten(0, 1).mT, out=out)
            if count < len(self._queries):
                self._scores[block, count:] = float("-inf")
        scores = self._scores[:, :, :, : self._counted]
        _cap(scores, softcap=softcap)
        by_answer = scores.unflatten(3, (M, G))  # [N, P, K, M, G, BLOCK]
        key_at = torch.arange(N * BLOCK).view(N, 1, 1, 1, 1, BLOCK)
        if slopes is not None:
            by_answer.add_(slopes.view(-1, 1, G, 1) * key_at)
        if window is not None:
            first = (self.positions - window).index_select(0, self._tiles).view(1, -1, 1, M, 1, 1)
            by_answer.masked_fill_(key_at <= first, float("-inf"))

    def highest(self) -> Tensor:
        """The largest score of each query: [1, answers, K, G, 1]."""
        return self._by_answer(self._scores[:, :, :, : self._counted].amax(dim=(0, 4)).unsqueeze(-1)).unsqueeze(0)

    def weigh(self, highest: Tensor, *, values: list[Tensor]) -> None:
        """highest: over all keys, [answers, K, G, 1]."""
        weights = self._scores[:, :, :, : self._counted]
        weights.sub_(self._by_prompt(highest)).exp_()
        for block, count in enumerate(self._prompts):
            left, out = self._scores[block, :count].flatten(0, 1), self._parts[block, :count].flatten(0, 1)
            torch.bmm(left, values[block][:count].flatten(0, 1), out=out)
            if count < len(self._queries):
                self._parts[block, count:] = 0
        parts = self._parts[:, :, :, : self._counted]
        self._weighed = tuple(
            self._by_answer(_added(part, first=None)) for part in (weights.sum(-1, keepdim=True), parts)
        )

    def total(self) -> Tensor:
        """Sums of weights, double precision [answers, K, G, 1]."""
        assert self._weighed is not None, "after `weigh`"
        return self._weighed[0]

    def summed(self) -> Tensor:
        """Sums of weighted values, double precision [answers, K, G, D]."""
        assert self._weighed is not None, "after `weigh`"
        return self._weighed[1]

    def _by_prompt(self, x: Tensor) -> Tensor:
        """[answers, K, G, X] -> [P, K, M G, X]."""
        P, M, K, G = self._shape
        return x.index_select(0, self._tiles).view(P, M, K, G, -1).transpose(1, 2).reshape(P, K, M * G, -1)

    def _by_answer(self, x: Tensor) -> Tensor:
        """[P, K, M G, X] -> [answers, K, G, X]."""
        P, M, K, G = self._shape
        return x.view(P, K, M, G, -1).transpose(1, 2).reshape(P * M, K, G, -1).index_select(0, self._back)


def _cap(scores: Tensor, *, softcap: float | None) -> None:
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)


def _in_order(parts: Tensor, *, first: Tensor | None) -> Tensor:
    """`first`, of blocks before, and the sum over blocks, one after the other, in double precision: [N, ...] -> fp32 [...]."""
    return parts[0] if first is None and len(parts) == 1 else _added(parts, first=first).float()


def _added(parts: Tensor, *, first: Tensor | None) -> Tensor:
    """As `_in_order`, in double precision."""
    total, others = (parts[0].double(), parts[1:]) if first is None else (first, parts)
    for part in others:
        total += part
    return total
