"""Attention over a cache, with sums whose order depends on positions alone.

[Note: Exactness]
A sequence's logits must not depend on what is computed beside it: other sequences, how its prompt was cut, drafts. A matrix product of a
library may sum in another order when it has another number of rows. So here
- every product has one shape: a tile of `GROUP * TILE` query rows (a query's row follows from its absolute position) times `BLOCK` keys;
- keys are summed in blocks of 64 from position 0 on, and the blocks' results are added in order, in double precision;
- the maximum that is taken off before exp is over all keys of the query: exact in any order.
Rows and keys that are not there are zero or masked, and add exactly nothing. The linear layers keep the same promise by oneDNN, whose rows
have the same bits for every number of rows from 2 on; `ztk.inference.probe` checks that when a model is loaded.
"""

import torch
from torch import Tensor

BLOCK = 64  # keys that are summed at once
_ROWS = 8  # query rows of a product, at least


def tile_of(group: int) -> int:
    """Positions whose queries share a product, for `group` query heads per key head."""
    return max(1, _ROWS // group)


def attend(
    query: Tensor,
    *,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """softmax(scale query key^T) value over each query's past: query [S, T, H, D] -> [S, T, H, D], fp32.

    S sequences, each with T new positions from starts[s] on (int64 [S]), whose keys and values are in the cache already: keys and values
    [S, K, N, D], N a multiple of 64, at least starts + T. window: a query sees that many keys, itself included. softcap: scores become
    c tanh(score / c). slopes [H]: ALiBi, slope times the key's position is added.
    """
    S, T, H, D = query.shape
    K, N = keys.shape[1], keys.shape[2]
    G, blocks = H // K, N // BLOCK
    tile = tile_of(G)
    tiles, rows = _tiles(query, starts=starts, heads=K, tile=tile)  # [S, K, Q, G * tile, D], int64 [S, T]
    Q = tiles.shape[2]
    by_block = keys.view(S, K, 1, blocks, BLOCK, D).transpose(-1, -2)
    scores = torch.matmul((tiles * scale).unsqueeze(3), by_block)  # [S, K, Q, blocks, G * tile, BLOCK]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.view(S, K, Q, blocks, G, tile, BLOCK)
    key_at = torch.arange(N).view(1, 1, 1, blocks, 1, 1, BLOCK)
    first = torch.div(starts, tile, rounding_mode="floor") * tile
    query_at = (first.view(S, 1) + torch.arange(Q * tile)).view(S, 1, Q, 1, 1, tile, 1)
    if slopes is not None:
        scores = scores + slopes.view(1, K, 1, 1, G, 1, 1) * key_at
    hidden = key_at > query_at
    if window is not None:
        hidden = hidden | (key_at <= query_at - window)
    scores = scores.masked_fill(hidden, float("-inf"))
    highest = scores.amax(dim=(3, 6), keepdim=True)
    weights = torch.exp(scores - highest)
    total = weights.sum(-1, keepdim=True).cumsum(3)[:, :, :, -1]  # [S, K, Q, G, tile, 1]
    parts = torch.matmul(weights.view(S, K, Q, blocks, G * tile, BLOCK), values.view(S, K, 1, blocks, BLOCK, D))
    summed = parts.cumsum(3)[:, :, :, -1].view(S, K, Q, G, tile, D) / total
    by_position = summed.permute(0, 2, 4, 1, 3, 5).reshape(S, Q * tile, H, D)
    return by_position.gather(1, rows.view(S, T, 1, 1).expand(S, T, H, D))


def _tiles(query: Tensor, *, starts: Tensor, heads: int, tile: int) -> tuple[Tensor, Tensor]:
    """Queries by absolute position in tiles, zero where there is none, [S, K, Q, G * tile, D]; and each query's place in them [S, T]."""
    S, T, H, D = query.shape
    rows = torch.remainder(starts, tile).view(S, 1) + torch.arange(T)
    Q = -(-(tile - 1 + T) // tile) if T > 1 else 1
    placed = query.new_zeros(S, Q * tile, H, D)
    placed.scatter_(1, rows.view(S, T, 1, 1).expand(S, T, H, D), query)
    tiles = placed.view(S, Q, tile, heads, H // heads, D).permute(0, 3, 1, 4, 2, 5)
    return tiles.reshape(S, heads, Q, (H // heads) * tile, D), rows
