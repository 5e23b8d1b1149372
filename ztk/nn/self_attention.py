"""Causal self-attention with grouped queries and rotary positions.

Shapes: B batch, T time, H query heads, K key and value heads, G = H / K, D head size, C width of the residual stream. H and K follow from
the shapes of the projections' weights: a tensor-parallel rank has some of the heads. Results have the dtype of x.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ztk.kernels import attention, attention_varlen, needs_reference, rope
from ztk.nn.config import DecoderConfig
from ztk.nn.documents import Documents
from ztk.nn.linear import WIDENED, Linear

_QUERY_BLOCK = 128
_MAX_HEAD = 256  # of ztk's kernel
_MAX_BLOCKWISE = 2048  # beyond this the saved probabilities, B * H * T * T bytes per layer, outweigh the gain


class Attention(nn.Module):
    """x [B, T, C] -> [B, T, C]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        # Positions of x if a rank has a part of the sequence: int64 [T] or a slice. None for positions from 0.
        self.positions: Tensor | slice | None = None
        self.query = Linear(config.dim, config.heads * config.head_dim)
        self.key = Linear(config.dim, config.kv_heads * config.head_dim)
        self.value = Linear(config.dim, config.kv_heads * config.head_dim)
        self.core = CausalAttention()
        self.out = Linear(config.heads * config.head_dim, config.dim)

    def forward(self, x: Tensor, *, cos: Tensor, sin: Tensor, documents: Documents | None = None) -> Tensor:
        """x [B, T, C] -> [B, T, C]. cos, sin: fp32 [max_seq_len, D / 2]. documents: the full sequences', also where x is a part of them."""
        query, key, value = (
            projection(x).unflatten(2, (-1, self.head_dim)) for projection in (self.query, self.key, self.value)
        )  # [B, T, H or K, D]
        own = slice(query.shape[1]) if self.positions is None else self.positions
        if documents is None:
            cos, sin = cos[own], sin[own]
            query, key = (rope(x, cos=cos, sin=sin) for x in (query, key))
        else:  # as one long sequence, with a row of the tables for each token
            places = documents.positions[:, own].flatten()
            cos, sin = cos[places], sin[places]
            query, key = (rope(x.flatten(0, 1)[None], cos=cos, sin=sin).view(x.shape) for x in (query, key))
        return self.out(self.core(query, key=key, value=value, documents=documents).flatten(2))


class CausalAttention(nn.Module):
    """A module around `causal_attention` (which gives the shapes) and `attention_in_documents`, so that it can be wrapped from outside."""

    def forward(self, query: Tensor, *, key: Tensor, value: Tensor, documents: Documents | None = None) -> Tensor:
        if documents is None:
            return causal_attention(query, key=key, value=value)
        return attention_in_documents(query, key=key, value=value, documents=documents)


def attention_in_documents(query: Tensor, *, key: Tensor, value: Tensor, documents: Documents) -> Tensor:
    """Attends like `causal_attention`, but within documents: query [B, T, H, D], key and value [B, T, K, D]; returns [B, T, H, D].

    On CPU 16-bit types are computed in float32, for the reason given there. Raises ValueError for documents that continue others.
    """
    if documents.continued is not None:
        raise ValueError(
            "documents go on with others, which ztk.rl.rollout.EngineAttention computes: use it, or full documents"
        )
    widens = query.device.type == "cpu" and query.dtype != torch.float32
    rows = (x.flatten(0, 1) for x in (query, key, value))
    q, k, v = (x.float() for x in rows) if widens else rows
    out = attention_varlen(q, k, v, cu_seqlens=documents.cu_seqlens, max_seqlen=documents.longest)
    return out.view(query.shape).to(query.dtype)


def causal_attention(query: Tensor, *, key: Tensor, value: Tensor) -> Tensor:
    """softmax(query key^T / sqrt(D)) value over the past.

    query [B, T, H, D], key and value [B, T, K, D]; returns [B, T, H, D]. On a GPU this uses ztk's kernel, whose backward has one order of
    summation: torch's default backward adds up with atomics, so two runs differ. On CPU torch's fused attention is slow in 16-bit types.
    Measured on one core of an EPYC, forward and backward of 4 x 128 tokens in 8 heads of 64,
    milliseconds: bfloat16 fused 10.4, in blocks 2.4; float16 fused 52.6, in float32 6.2.
    """
    if needs_reference() or (query.device.type != "cpu" and query.shape[3] <= _MAX_HEAD):
        return attention(query, key, value)
    if query.device.type != "cpu" or query.dtype == torch.float32:
        return _fused(query, key=key, value=value)
    if query.dtype in WIDENED:
        return _fused(query.float(), key=key.float(), value=value.float()).to(query.dtype)
    if query.shape[1] > _MAX_BLOCKWISE:
        return _fused(query, key=key, value=value)
    return _blockwise(query, key=key, value=value)


def _fused(query: Tensor, *, key: Tensor, value: Tensor) -> Tensor:
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    return out.transpose(1, 2)


def _blockwise(query: Tensor, *, key: Tensor, value: Tensor) -> Tensor:
    """Matrix products over blocks of queries, each with the keys up to its end: half the work of the full square."""
    B, T, H, D = query.shape
    K, G = key.shape[2], H // key.shape[2]
    query = (query * D**-0.5).view(B, T, K, G, D).permute(0, 2, 3, 1, 4)  # [B, K, G, T, D]
    key = key.transpose(1, 2).reshape(B * K, T, D)
    value = value.transpose(1, 2).reshape(B * K, T, D)
    blocks = []
    for start in range(0, T, _QUERY_BLOCK):
        stop = min(start + _QUERY_BLOCK, T)
        rows = query[:, :, :, start:stop].reshape(B * K, G * (stop - start), D)
        scores = torch.bmm(rows, key[:, :stop].transpose(1, 2)).view(B * K, G, stop - start, stop)
        future = torch.full((stop - start, stop), float("-inf"), dtype=query.dtype).triu_(start + 1)
        weights = torch.softmax(scores + future, dim=-1).view(B * K, G * (stop - start), stop)
        blocks.append(torch.bmm(weights, value[:, :stop]).view(B, K, G, stop - start, D))
    return torch.cat(blocks, dim=3).permute(0, 3, 1, 2, 4).reshape(B, T, H, D)
