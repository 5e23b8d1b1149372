"""Attention over a cache, with sums whose order depends on positions alone.

[Note: Exactness]
A sequence's logits must not depend on what is computed beside it: other sequences, how its prompt was cut, drafts. A matrix product of a
library may sum in another order when it has another number of rows. So here
- every product has one shape: a tile of query rows (a query's row follows from its absolute position) times `BLOCK` keys;
- keys are summed in blocks of 64 from position 0 on, and the blocks' results are added in order, in double precision;
- the maximum that is taken off before exp is over all keys of the query: exact in any order.
Keys that are not there or not seen are masked and add exactly nothing; rows that are not there are copies, and are not read. The linear
layers keep the same promise by oneDNN or by a row at a time, see `ztk.inference.products`; `ztk.inference.probe` checks that when a model
is loaded.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

BLOCK = 64  # keys that are summed at once
_ROWS = 8  # query rows of a product, at least


def tile_of(group: int) -> int:
    """Positions whose queries share a product, for `group` query heads per key head."""
    return max(1, _ROWS // group)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Q tiles of `tile` consecutive positions, the first of which is a multiple of `tile`.

    rows: int64 [Q, tile], which row of the step is at each place; where there is none, any. slots, blocks: per tile, the cache's slot and
    how many blocks of keys it reads. firsts: int64 [Q], absolute position of the first place. lines: int64 [Q], the only place that
    counts; None: all do. targets, sources: int64, rows of the step and the places in Q * tile (in Q, with lines) whose results they take.
    """

    tile: int
    rows: Tensor
    slots: list[int]
    blocks: list[int]
    firsts: Tensor
    lines: Tensor | None
    targets: Tensor
    sources: Tensor
    _hidden: dict = field(default_factory=dict)

    @property
    def positions(self) -> Tensor:
        """int64 [Q, places that count]."""
        if self.lines is None:
            return self.firsts.unsqueeze(1) + torch.arange(self.tile)
        return (self.firsts + self.lines).unsqueeze(1)

    def hidden(self, *, window: int | None) -> Tensor:
        """bool [Q, blocks, 1, 1, places, BLOCK]: keys that a query does not see. window: it sees that many, itself included."""
        if window not in self._hidden:
            count = max(self.blocks)
            key_at = torch.arange(count * BLOCK).view(1, count, 1, 1, 1, BLOCK)
            query_at = self.positions.view(len(self.slots), 1, 1, 1, -1, 1)
            found = key_at > query_at
            self._hidden[window] = found if window is None else found | (key_at <= query_at - window)
        return self._hidden[window]


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
) -> Tensor:
    """softmax(scale query key^T) value over each query's past: query [M, H, D] -> fp32 [len(tiles.targets), H, D].

    keys and values: fp32 [slots, blocks, K, BLOCK, D], with those of all rows of the step. window: a query sees that many keys, itself
    included. softcap: scores become c tanh(score / c). slopes [H]: ALiBi, slope times the key's position is added.
    """
    (_, H, D), K = query.shape, keys.shape[2]
    Q, G, T, N = len(tiles.slots), H // K, tiles.tile, max(tiles.blocks)
    by_tile = (query * scale)[tiles.rows].view(Q, T, K, G, D).permute(0, 2, 3, 1, 4).reshape(Q, K, G * T, D)
    scores = query.new_empty(Q, N, K, G * T, BLOCK)
    for q, (slot, count) in enumerate(zip(tiles.slots, tiles.blocks, strict=True)):
        left = by_tile[q].expand(count, K, G * T, D).reshape(count * K, G * T, D)
        right = keys[slot, :count].view(count * K, BLOCK, D).transpose(1, 2)
        torch.bmm(left, right, out=scores[q, :count].view(count * K, G * T, BLOCK))
    scores = scores.view(Q, N, K, G, T, BLOCK)
    if tiles.lines is not None:
        scores = scores[torch.arange(Q), :, :, :, tiles.lines].unsqueeze(4)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if slopes is not None:
        scores = scores + slopes.view(K, G, 1, 1) * torch.arange(N * BLOCK).view(N, 1, 1, 1, BLOCK)
    scores = scores.masked_fill_(tiles.hidden(window=window), float("-inf"))
    weights = scores.sub_(scores.amax(dim=(1, 5), keepdim=True)).exp_()
    total = weights.sum(-1, keepdim=True).cumsum(1)[:, -1]  # [Q, K, G, places, 1]
    places = weights.shape[4]
    spread = weights.expand(Q, N, K, G, T, BLOCK).reshape(Q, N, K, G * T, BLOCK)
    parts = query.new_empty(Q, N, K, G * T, D)
    for q, (slot, count) in enumerate(zip(tiles.slots, tiles.blocks, strict=True)):
        right = values[slot, :count].view(count * K, BLOCK, D)
        left, out = spread[q, :count].view(count * K, G * T, BLOCK), parts[q, :count].view(count * K, G * T, D)
        torch.bmm(left, right, out=out)
    parts = parts.view(Q, N, K, G, T, D)
    if tiles.lines is not None:
        parts = parts[torch.arange(Q), :, :, :, tiles.lines].unsqueeze(4)
    if min(tiles.blocks) < N:
        beyond = torch.arange(N).view(1, N) >= torch.tensor(tiles.blocks).view(Q, 1)
        parts = parts.masked_fill_(beyond.view(Q, N, 1, 1, 1, 1), 0.0)
    summed = parts.cumsum(1)[:, -1] / total  # [Q, K, G, places, D]
    return summed.permute(0, 3, 1, 2, 4).reshape(Q * places, H, D)[tiles.sources]
