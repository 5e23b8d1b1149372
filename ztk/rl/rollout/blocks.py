"""Attention of a forward's texts, and its gradient: products of blocks of `BLOCK` keys, over all heads and texts of similar length.

The result is bitwise equal to the inference engine's `attend` (see [Note: The cache's bits] in `attention`): the products, maxima and
sums are the same, in the same order of blocks. Products have another number of rows if `rows_agree` finds that this changes no bit on
this processor, and the engine's number of rows otherwise. The gradient recomputes the scores instead of storing them:

    weights = exp(scores - logsumexp)          d_scores = weights (d_out value^T - sum(d_out out))
    d_value = weights^T d_out                  d_query = scale d_scores key                  d_key = scale d_scores^T query

Legend: S segments, K key heads, G query heads per key head, R positions of a segment, T positions of a tile, D head size, N blocks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ztk.kernels.shared.cached_attention import BLOCK, rows_agree, tile_of

TILE = 8  # segments are computed in multiples of this many positions, which covers all tiles of the engine (1 to 8)
_ALIKE = (
    32  # segments in a group differ by less than this many positions; the padding costs less than many small groups
)
ROWS = 2 * BLOCK  # most queries of a segment, because scores of all keys are materialized
_AWAY = -1e38  # added to hidden scores: far below any visible score, and finite
_SCORES = 1 << 20  # scores of a group: 4 MiB, which stay in the cache between products


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """The queries of `length` tokens from row `row` on, at positions from `start` on.

    The text's tokens before position `border` start at row `before`, where several texts may share them; the others precede `row`.
    """

    row: int
    length: int
    start: int = 0
    border: int = 0
    before: int = 0


class Blocks:
    """The positions of some texts' tokens in the products. segments: each token's query is in exactly one. tokens: number in the forward."""

    def __init__(self, segments: Sequence[Segment], *, tokens: int, kv_heads: int, group: int, head_dim: int) -> None:
        self._sizes = (tokens, kv_heads, group, head_dim)
        most = None if rows_agree(group, head_dim=head_dim, threads=torch.get_num_threads()) else tile_of(group) * group
        self._groups = [
            _Group(together, kv_heads=kv_heads, group=group, most_rows=most)
            for together in _alike(segments, heads=kv_heads * group)
        ]
        places = torch.empty(tokens * kv_heads * group, dtype=torch.int64)
        first = 0
        for group_ in self._groups:
            places[group_.query_at[group_.own]] = first + group_.own
            first += len(group_.query_at)
        self._places = places  # index of every query in the groups' rows

    def attend(self, query: Tensor, *, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """query fp32 [tokens, H, D], key and value [tokens, K, D] -> softmax(query key^T / sqrt(D)) value over the past, [tokens, H, D],
        and the logsumexp of every row in the groups' order, for `gradients`.
        """
        query, key, value = (x.reshape(-1, x.shape[-1]) for x in (query, key, value))
        found = [group.attend(query, key=key, value=value) for group in self._groups]
        out = torch.cat([out for out, _ in found]).index_select(0, self._places)
        return out.view(self._sizes[0], -1, self._sizes[3]), torch.cat([lse for _, lse in found])

    def gradients(
        self, d_out: Tensor, *, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of query, key and value, in their shapes. out, lse: of `attend`."""
        tokens, K, _, D = self._sizes
        delta = (d_out * out).sum(-1).view(-1)
        flat = [x.reshape(-1, D) for x in (d_out, query, key, value)]
        d_query, d_key, d_value = [], key.new_zeros(tokens * K, D), value.new_zeros(tokens * K, D)
        first = 0
        for group in self._groups:
            own = slice(first, first + len(group.query_at))
            first = own.stop
            d_query.append(group.add_gradients(*flat, delta=delta, lse=lse[own], d_key=d_key, d_value=d_value))
        places = torch.cat(d_query).index_select(0, self._places)
        return places.view(query.shape), d_key.view(key.shape), d_value.view(value.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    """A block of keys.

    keys: range in the segments' keys. first: first row that attends to any of them.
    seen: fp32 [n, BLOCK], 1 for visible keys of the n rows from `first` on, else 0; later rows attend to all. None if every row attends
    to all.
    away: the same with `_AWAY` in place of 0, and 0 in place of 1.

    An exponential of minus infinity takes 2.4 times as long as of another number, and a masked fill 9 times as long as a multiplication.
    """

    keys: slice
    first: int
    seen: Tensor | None
    away: Tensor | None

    def hide(self, scores: Tensor) -> None:
        """Makes the hidden entries of [S K, rows, BLOCK] lower than all others."""
        if self.away is not None:
            scores[:, : len(self.away)].add_(self.away)

    def exponentials(self, scores: Tensor) -> Tensor:
        """Exponentiates in place. Hidden entries become 0."""
        if self.seen is None:
            return scores.exp_()
        part = scores[:, : len(self.seen)].mul_(self.seen)
        scores.exp_()
        part.mul_(self.seen)
        return scores


class _Group:
    """Segments with a similar number of tiles from the same position on, computed together.

    A tile has T consecutive positions, starting at a multiple of T. Rows are in the engine's order: tiles, heads, positions. They cover
    multiples of `TILE` positions, with copies of arbitrary queries as padding. query_at: int64 [S K R G], head and token of each row.
    own: rows that are not copies, int64. key_at: int64 [S K N BLOCK].
    """

    def __init__(self, segments: Sequence[Segment], *, kv_heads: int, group: int, most_rows: int | None) -> None:
        S, K, G, T, base = len(segments), kv_heads, group, tile_of(group), _base(segments[0])
        R = max(_queries(segment) for segment in segments)
        N = -(-(base + R) // BLOCK)
        self._G, self._R, self._T, self._most = G, R, T, most_rows or R * G
        row, length, start, border, before = (
            torch.tensor([getattr(segment, name) for segment in segments]).unsqueeze(1)
            for name in ("row", "length", "start", "border", "before")
        )
        places = base + torch.arange(R) - start  # [S, R], of each segment's queries
        tokens = row + torch.minimum(places.clamp(min=0), length - 1)
        at = torch.minimum(
            torch.arange(N * BLOCK), start + length - 1
        )  # copies follow the last key, hidden from all queries
        sources = torch.where(at < border, before + at, row + at - start)  # [S, N BLOCK]
        heads = torch.arange(K * G).view(1, K, 1, G, 1)
        self.query_at = (tokens.view(S, 1, -1, 1, T) * (K * G) + heads).flatten()
        self.key_at = (sources.view(S, 1, -1) * K + torch.arange(K).view(1, K, 1)).flatten()
        copies = ((places < 0) | (places >= length)).view(S, 1, -1, 1, T).expand(S, K, -1, G, T).flatten()
        self.own, self._copies = (~copies).nonzero().squeeze(1), copies.nonzero().squeeze(1)
        self._blocks = [self._block(n, base=base) for n in range(N)]

    def _block(self, n: int, *, base: int) -> _Block:
        first = max(0, n * BLOCK - base) // TILE * TILE
        last = min(self._R, (n + 1) * BLOCK - base)
        seen = away = None
        if last > first:
            at = (base + torch.arange(first, last)).view(-1, 1, self._T).expand(-1, self._G, -1).flatten()
            seen = (n * BLOCK + torch.arange(BLOCK) <= at.unsqueeze(1)).float()
            away = _AWAY * (1 - seen)
        return _Block(keys=slice(n * BLOCK, (n + 1) * BLOCK), first=first * self._G, seen=seen, away=away)

    def _taken(self, x: Tensor, *, at: Tensor) -> Tensor:
        """Gathers rows of x [any, D] for the products: [S K, R G or N BLOCK, D]."""
        return x.index_select(0, at).view(len(self.query_at) // (self._R * self._G), -1, x.shape[-1])

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        """Multiplies [S K, rows, X] by [S K, X, Y], bitwise equal to the engine's product.

        The result has its own memory, because it is overwritten, and selective recomputation stores results of `bmm`.
        """
        if left.shape[1] <= self._most:
            return torch.bmm(left, right, out=left.new_empty(*left.shape[:2], right.shape[2]))
        return torch.cat([torch.bmm(part, right) for part in left.split(self._most, dim=1)], dim=1)

    def _scores(self, query: Tensor, *, key: Tensor) -> Iterator[tuple[_Block, Tensor]]:
        """Yields the scores of every block for the rows that read it, [S K, rows, BLOCK]. query: times the scale."""
        for block in self._blocks:
            yield block, self._product(query[:, block.first :], key[:, block.keys].mT)

    def attend(self, query: Tensor, *, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the rows of this group: results [S K R G, D] and logsumexp [S K R G]. query [tokens H, D], key and value [tokens K,
        D].
        """
        q = self._taken(query, at=self.query_at).mul_(query.shape[-1] ** -0.5)
        k, v = (self._taken(x, at=self.key_at) for x in (key, value))
        scores = list(self._scores(q, key=k))
        highest = None
        for block, part in scores:
            block.hide(part)
            found = part.amax(-1, keepdim=True)
            if highest is None:
                highest = found
            else:
                own = highest[:, block.first :]
                torch.maximum(own, found, out=own)
        assert highest is not None, "a segment has a block"
        total = summed = None
        for block, part in scores:
            block.exponentials(part.sub_(highest[:, block.first :]))
            total = _added(total, part.sum(-1, keepdim=True), first=block.first, dtype=torch.float64)
            summed = _added(summed, self._product(part, v[:, block.keys]), first=block.first, dtype=torch.float32)
        assert total is not None and summed is not None, "a segment has a block"
        sums = total.float()
        out = summed.div_(sums)
        return out.view(-1, out.shape[-1]), highest.add_(sums.log_()).view(-1)

    def add_gradients(
        self,
        d_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        delta: Tensor,
        lse: Tensor,
        d_key: Tensor,
        d_value: Tensor,
    ) -> Tensor:
        """Returns the gradient of this group's queries, [S K R G, D].

        Adds to the gradients of keys and values, [tokens K, D]. delta: [tokens H].
        """
        scale = query.shape[-1] ** -0.5
        d, q = (self._taken(x, at=self.query_at) for x in (d_out, query))
        d.view(-1, d.shape[-1]).index_fill_(0, self._copies, 0.0)
        k, v = (self._taken(x, at=self.key_at) for x in (key, value))
        delta = delta.index_select(0, self.query_at).index_fill_(0, self._copies, 0.0).view(*q.shape[:2], 1)
        lse, d_k, d_v = lse.view(*q.shape[:2], 1), torch.empty_like(k), torch.empty_like(v)
        d_q = None
        for block, scores in self._scores(q.mul_(scale), key=k):
            rows = slice(block.first, None)
            weights = block.exponentials(scores.sub_(lse[:, rows]))
            d_v[:, block.keys] = torch.bmm(weights.mT, d[:, rows])
            d_scores = torch.bmm(d[:, rows], v[:, block.keys].mT).sub_(delta[:, rows]).mul_(weights)
            d_k[:, block.keys] = torch.bmm(d_scores.mT, q[:, rows])
            d_q = _added(d_q, torch.bmm(d_scores, k[:, block.keys]), first=block.first, dtype=torch.float32)
        assert d_q is not None, "a segment has a block"
        for total, part in ((d_key, d_k), (d_value, d_v)):
            total.index_add_(0, self.key_at, part.view(-1, part.shape[-1]))
        return d_q.mul_(scale).view(-1, d_q.shape[-1])


def _added(total: Tensor | None, part: Tensor, *, first: int, dtype: torch.dtype) -> Tensor:
    """Adds a block's part [S K, rows, X] of the rows from `first` on to the sums of all rows, in place; the first block has all rows."""
    if total is None:
        return part.to(dtype)
    total[:, first:] += part
    return total


def _base(segment: Segment) -> int:
    """Returns the position of the first row."""
    return segment.start // TILE * TILE


def _queries(segment: Segment) -> int:
    """Returns R of a single segment."""
    return -(-(segment.start + segment.length - _base(segment)) // TILE) * TILE


def _alike(segments: Sequence[Segment], *, heads: int) -> list[list[Segment]]:
    """Groups segments of similar size, with at most `ROWS` queries each."""
    found: dict[tuple[int, int], list[Segment]] = {}
    for segment in segments:
        for first in range(0, segment.length, ROWS):
            length, start = min(ROWS, segment.length - first), segment.start + first
            part = replace(segment, row=segment.row + first, length=length, start=start)
            found.setdefault((_base(part), -(-_queries(part) // _ALIKE)), []).append(part)
    groups = []
    for (base, _), alike in found.items():
        queries = max(map(_queries, alike))
        size = max(1, _SCORES // (heads * queries * (base + queries)))
        groups += [alike[first : first + size] for first in range(0, len(alike), size)]
    return groups
