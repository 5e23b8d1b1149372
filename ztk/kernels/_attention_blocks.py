"""Attention of a block of queries to one block of keys, for keys that arrive block by block (`ztk.sequence.ring`).

A block returns its own softmax, normalised, with the log-sum-exp of its scores, by which results of several blocks are merged. The
backward of a block takes the output and the log-sum-exp over all blocks, and gives this block's parts of the gradients.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ztk.kernels._library import use_reference
from ztk.kernels.attention import _forward
from ztk.kernels.attention_backward import backward

_ROWS = 128  # queries whose scores exist at one time, where they are computed in full


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A block of `length` queries and one of as many keys. distance: from a key to the query of the same number, in tokens, 0 or more.

    Key j is visible to query i when 0 <= distance + i - j, and below `window` if that is not 0.
    """

    length: int
    distance: int
    window: int

    @property
    def is_empty(self) -> bool:
        """No query sees a key."""
        return self.window > 0 and self.distance - self.length + 1 >= self.window

    @property
    def is_full(self) -> bool:
        """Every query sees every key."""
        return self.distance >= self.length and (not self.window or self.distance + self.length - 1 < self.window)

    @property
    def has_kernel(self) -> bool:
        """The kernels of `attention` compute it; a window that ends inside a block before the queries' own they do not."""
        return not use_reference() and (self.is_full or not self.distance)


def attention_block(q: Tensor, k: Tensor, v: Tensor, *, pair: Pair, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) of a block: out [tokens, H, D] in q's dtype, 0 where a query sees no key; lse fp32 [H, tokens], -inf there.

    q: [tokens, H, D], k and v: [tokens, H_kv, D], sequences of `pair.length` tokens one after another, dense.
    """
    if pair.has_kernel:
        causal = not pair.is_full
        return _forward(q, k, v, None, pair.length, causal, pair.window if causal else 0, scale)
    outs, sums = [], []
    for _, scores in _scores(q, k, pair=pair, scale=scale):
        lse = scores.logsumexp(-1)  # [B, K, G, rows]
        p = torch.exp(scores - lse.clamp(min=torch.finfo(lse.dtype).min)[..., None])
        outs.append(torch.einsum("bkgij,bjkd->bikgd", p, _batched(v, pair=pair).float()).flatten(2, 3))
        sums.append(lse.flatten(1, 2))
    out = torch.cat(outs, dim=1).flatten(0, 1).to(q.dtype)
    return out, torch.cat(sums, dim=2).transpose(0, 1).flatten(1)


def attention_block_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor, pair: Pair, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's parts of the gradients of q, k and v, of their shapes. d_out, out: [tokens, H, D]; lse: fp32 [H, tokens], over all
    blocks."""
    if pair.has_kernel:
        causal = not pair.is_full
        return backward(d_out, q, k, v, out, lse, None, pair.length, causal, pair.window if causal else 0, scale)
    keys, values = _batched(k, pair=pair).float(), _batched(v, pair=pair).float()
    heads = k.shape[1]
    queries, d_outs, outs = (_grouped(x, heads=heads, pair=pair) for x in (q, d_out, out))
    delta = (outs * d_outs).sum(-1)  # [B, T, K, G]
    totals = lse.unflatten(1, (-1, pair.length)).transpose(0, 1).unflatten(1, (heads, -1))  # [B, K, G, T]
    d_q = torch.empty_like(queries)
    d_k, d_v = torch.zeros_like(keys), torch.zeros_like(values)
    for rows, scores in _scores(q, k, pair=pair, scale=scale):
        p = torch.exp(scores - totals[..., rows, None])
        d_p = torch.einsum("bikgd,bjkd->bkgij", d_outs[:, rows], values)
        d_s = p * (d_p - delta[:, rows].permute(0, 2, 3, 1)[..., None]) * scale
        d_q[:, rows] = torch.einsum("bkgij,bjkd->bikgd", d_s, keys)
        d_k += torch.einsum("bkgij,bikgd->bjkd", d_s, queries[:, rows])
        d_v += torch.einsum("bkgij,bikgd->bjkd", p, d_outs[:, rows])
    return tuple(x.reshape(like.shape).to(like.dtype) for x, like in ((d_q, q), (d_k, k), (d_v, v)))


def _scores(q: Tensor, k: Tensor, *, pair: Pair, scale: float) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their scores fp32 [B, K, G, rows, T]), the invisible ones at -inf, some rows at a time."""
    queries = _grouped(q, heads=k.shape[1], pair=pair)
    keys = _batched(k, pair=pair).float()
    columns = torch.arange(pair.length, device=q.device)
    for start in range(0, pair.length, _ROWS):
        rows = slice(start, min(start + _ROWS, pair.length))
        apart = pair.distance + columns[rows, None] - columns[None, :]
        hidden = (apart < 0) | (apart >= pair.window) if pair.window else apart < 0
        scores = torch.einsum("bikgd,bjkd->bkgij", queries[:, rows], keys) * scale
        yield rows, scores.masked_fill(hidden, float("-inf"))


def _grouped(x: Tensor, *, heads: int, pair: Pair) -> Tensor:
    """[tokens, H, D] -> fp32 [B, T, K, G, D]."""
    return _batched(x, pair=pair).float().unflatten(2, (heads, -1))


def _batched(x: Tensor, *, pair: Pair) -> Tensor:
    """[tokens, heads, D] -> [B, T, heads, D]."""
    return x.unflatten(0, (-1, pair.length))
