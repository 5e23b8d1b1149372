"""Attention of a block of queries to one block of keys, for keys that arrive block by block (`ztk.parallel.sequence.ring`).

A block returns its own softmax, normalised, with the log-sum-exp of its scores, by which results of several blocks are merged. The
backward of a block takes the output and the log-sum-exp over all blocks, and gives this block's parts of the gradients.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ztk.kernels.launch.library import use_reference
from ztk.kernels.ops.attention import _forward
from ztk.kernels.ops.attention_backward import backward

_ROWS = 128  # queries whose scores exist at one time, where they are computed in full


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A block of `length` queries and one of `keys` keys. distance: from a key to the query of the same number, in tokens, 0 or more.

    Key j is visible to query i when 0 <= distance + i - j, and below `window` if that is not 0.
    """

    length: int
    keys: int
    distance: int
    window: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether all pairs are masked."""
        return self.window > 0 and self.distance - self.keys + 1 >= self.window

    @property
    def is_full(self) -> bool:
        """Whether no pair is masked."""
        return self.distance >= self.keys and (not self.window or self.distance + self.length - 1 < self.window)

    @property
    def has_kernel(self) -> bool:
        """The kernels of `attention` compute it; a window that ends inside a block before the queries' own they do not."""
        return not use_reference() and self.keys == self.length and (self.is_full or not self.distance)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Queries from token `query` on and keys from `key` on, of a rank's blocks, that are a pair."""

    query: int
    key: int
    pair: Pair

    @property
    def rows(self) -> slice:
        """The queries."""
        return slice(self.query, self.query + self.pair.length)

    @property
    def columns(self) -> slice:
        """The keys."""
        return slice(self.key, self.key + self.pair.keys)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedPair:
    """Blocks of packed documents. Tokens belong to at most one of `parts`, and all pairs outside of them are masked.

    cu_seqlens, longest: if both blocks are the same one, its documents' ends, int32 [documents + 1], and the tokens of the longest.
    """

    parts: tuple[Part, ...]
    cu_seqlens: Tensor | None = None
    longest: int = 0

    @property
    def has_kernel(self) -> bool:
        """The kernels of `attention` compute it at once."""
        return self.cu_seqlens is not None and not use_reference()


def attention_block(q: Tensor, k: Tensor, v: Tensor, *, pair: Pair | PackedPair, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) of a block: out [tokens, H, D] in q's dtype, 0 for queries without visible keys; lse fp32 [H, tokens], -inf there.

    q: [tokens, H, D], k and v: [tokens, H_kv, D], dense; for a `Pair`, sequences of `pair.length` tokens one after another.
    """
    if isinstance(pair, PackedPair):
        return _packed_block(q, k, v, pair=pair, scale=scale)
    if pair.has_kernel:
        causal = not pair.is_full
        return _forward(q, k, v, None, pair.length, causal, pair.window if causal else 0, scale)
    outs, sums = [], []
    for _, scores in _scores(q, k, pair=pair, scale=scale):
        lse = scores.logsumexp(-1)  # [B, K, G, rows]
        p = torch.exp(scores - lse.clamp(min=torch.finfo(lse.dtype).min)[..., None])
        outs.append(torch.einsum("bkgij,bjkd->bikgd", p, _batched(v, length=pair.keys).float()).flatten(2, 3))
        sums.append(lse.flatten(1, 2))
    out = torch.cat(outs, dim=1).flatten(0, 1).to(q.dtype)
    return out, torch.cat(sums, dim=2).transpose(0, 1).flatten(1)


def attention_block_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor, pair: Pair | PackedPair, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's parts of the gradients of q, k and v, of their shapes. d_out, out: [tokens, H, D]; lse: fp32 [H, tokens], over all
    blocks."""
    if isinstance(pair, PackedPair):
        return _packed_block_backward(d_out, q, k, v, out=out, lse=lse, pair=pair, scale=scale)
    if pair.has_kernel:
        causal = not pair.is_full
        return backward(d_out, q, k, v, out, lse, None, pair.length, causal, pair.window if causal else 0, scale)
    keys, values = (_batched(x, length=pair.keys).float() for x in (k, v))
    heads = k.shape[1]
    queries, d_outs, outs = (_grouped(x, heads=heads, length=pair.length) for x in (q, d_out, out))
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
    """(rows, their scores fp32 [B, K, G, rows, keys]), the invisible ones at -inf, some rows at a time."""
    queries = _grouped(q, heads=k.shape[1], length=pair.length)
    keys = _batched(k, length=pair.keys).float()
    numbers = torch.arange(max(pair.length, pair.keys), device=q.device)
    for start in range(0, pair.length, _ROWS):
        rows = slice(start, min(start + _ROWS, pair.length))
        apart = pair.distance + numbers[rows, None] - numbers[None, : pair.keys]
        hidden = (apart < 0) | (apart >= pair.window) if pair.window else apart < 0
        scores = torch.einsum("bikgd,bjkd->bkgij", queries[:, rows], keys) * scale
        yield rows, scores.masked_fill(hidden, float("-inf"))


def _packed_block(q: Tensor, k: Tensor, v: Tensor, *, pair: PackedPair, scale: float) -> tuple[Tensor, Tensor]:
    if pair.has_kernel:
        return _forward(q, k, v, pair.cu_seqlens, pair.longest, True, 0, scale)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), float("-inf"), device=q.device)
    for part in pair.parts:
        found = attention_block(q[part.rows], k[part.columns], v[part.columns], pair=part.pair, scale=scale)
        out[part.rows], lse[:, part.rows] = found
    return out, lse


def _packed_block_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor, pair: PackedPair, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    if pair.has_kernel:
        return backward(d_out, q, k, v, out, lse, pair.cu_seqlens, pair.longest, True, 0, scale)
    d_q, d_k, d_v = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    for part in pair.parts:
        rows, columns = part.rows, part.columns
        own = {"out": out[rows], "lse": lse[:, rows].contiguous(), "pair": part.pair, "scale": scale}
        d_q[rows], d_k[columns], d_v[columns] = attention_block_backward(
            d_out[rows], q[rows], k[columns], v[columns], **own
        )
    return d_q, d_k, d_v


def _grouped(x: Tensor, *, heads: int, length: int) -> Tensor:
    """[tokens, H, D] -> fp32 [B, T, K, G, D]."""
    return _batched(x, length=length).float().unflatten(2, (heads, -1))


def _batched(x: Tensor, *, length: int) -> Tensor:
    """[tokens, heads, D] -> [B, T, heads, D]."""
    return x.unflatten(0, (-1, length))
