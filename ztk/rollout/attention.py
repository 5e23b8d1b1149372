"""The trainer's attention with the bits of the inference engine's, so that answers drawn with a cache have the trainer's log-probabilities.

[Note: The cache's bits]
Of the native decoder in fp32 on a CPU, attention is the only operation that the inference engine computes in another order than the trainer's
forward: norms, linear layers (oneDNN's rows have the same bits in any number), rotary embedding and activations give equal bits. Torch's fused
attention sums over keys in blocks whose borders depend on the number of queries, and differs from position 1 of the first layer on. So the
trainer computes its forward by the engine's function, over the same tiles of queries and blocks of keys. The gradient is that of torch's
attention at the same operands: it needs no bits of the engine's.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ztk.inference.attention import BLOCK, attend
from ztk.inference.steps import Span, Step
from ztk.nn import Documents
from ztk.nn.attention import CausalAttention, attention_in_documents, causal_attention


class CachedAttention(CausalAttention):
    """softmax(query key^T / sqrt(D)) value over the past, fp32 on the CPU: [B, T, H, D], keys and values [B, T, K, D].

    documents: texts that share a row, each of which has a past of its own; None: every row is one text.
    """

    def forward(self, query: Tensor, *, key: Tensor, value: Tensor, documents: Documents | None = None) -> Tensor:
        return _Attention.apply(query, key, value, documents)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, documents: Documents | None) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.documents = documents
        B, T, H, _ = query.shape
        starts = tuple(range(0, B * T, T)) if documents is None else _starts(documents, T=T)
        return _attend(query, key=key, value=value, places=_places(starts, B * T, H // key.shape[2]))

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            query, key, value = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
            if ctx.documents is None:
                out = causal_attention(query, key=key, value=value)
            else:
                out = attention_in_documents(query, key=key, value=value, documents=ctx.documents)
        return *torch.autograd.grad(out, (query, key, value), d_out), None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Places:
    """Of N tokens of S texts. step: where their queries are. keys: where each token's key is in S caches of `blocks` blocks, int64 [N]."""

    step: Step
    keys: Tensor
    texts: int
    blocks: int


def _starts(documents: Documents, *, T: int) -> tuple[int, ...]:
    return tuple(row * T + start for row, starts in enumerate(documents.starts) for start in starts)


@functools.lru_cache(maxsize=8)  # the layers of a forward, and of rows all forwards, have the same
def _places(starts: tuple[int, ...], total: int, group: int) -> _Places:
    """starts: of texts that lie one after another; total: tokens of all. group: query heads per key head."""
    lengths = [stop - start for start, stop in zip(starts, (*starts[1:], total), strict=True)]
    spans = [
        Span(slot=slot, start=0, length=length, row=row)
        for slot, (row, length) in enumerate(zip(starts, lengths, strict=True))
    ]
    step, blocks = Step(spans, group=group), -(-max(lengths) // BLOCK)
    return _Places(step=step, keys=step.slots * (blocks * BLOCK) + step.positions, texts=len(spans), blocks=blocks)


def _attend(query: Tensor, *, key: Tensor, value: Tensor, places: _Places) -> Tensor:
    """Every text is a sequence of its own, whose keys lie in a cache of its own."""
    D = query.shape[3]
    slabs = [_in_blocks(part.flatten(0, 1), places=places) for part in (key, value)]
    rows = query.flatten(0, 1)
    out = torch.empty_like(rows)
    for tiles in places.step.groups:
        out[tiles.targets] = attend(rows, tiles=tiles, keys=slabs[0], values=slabs[1], scale=D**-0.5)
    return out.view(query.shape)


def _in_blocks(part: Tensor, *, places: _Places) -> Tensor:
    """[N, K, D] -> [texts, blocks, K, BLOCK, D], as a cache keeps it; behind the last key zeros."""
    _, K, D = part.shape
    padded = part.new_zeros(places.texts * places.blocks * BLOCK, K, D).index_copy_(0, places.keys, part)
    return padded.view(places.texts, places.blocks, BLOCK, K, D).transpose(2, 3).contiguous()


def use_cached_attention(module: nn.Module) -> None:
    """Replaces the attention of every block of a native decoder by `CachedAttention`."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is CausalAttention:
                setattr(parent, name, CachedAttention())
