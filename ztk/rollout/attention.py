"""The trainer's attention with the bits of the inference engine's, so that answers drawn with a cache have the trainer's log-probabilities.

[Note: The cache's bits]
Of the native decoder in fp32 on a CPU, attention is the only operation that the inference engine computes in another order than the trainer's
forward: norms, linear layers (oneDNN's rows have the same bits in any number), rotary embedding and activations give equal bits. Torch's fused
attention sums over keys in blocks whose borders depend on the number of queries, and differs from position 1 of the first layer on. So the
trainer computes its forward by the engine's function, over the same tiles of queries and blocks of keys. The gradient is that of torch's
attention at the same operands: it needs no bits of the engine's.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ztk.inference.attention import BLOCK
from ztk.inference.steps import Span, Step
from ztk.nn.attention import CausalAttention, causal_attention


class CachedAttention(CausalAttention):
    """softmax(query key^T / sqrt(D)) value over the past, fp32 on the CPU: [B, T, H, D], keys and values [B, T, K, D]."""

    def forward(self, query: Tensor, *, key: Tensor, value: Tensor, documents: Any = None) -> Tensor:
        assert documents is None, "rows of rollouts are one text each"
        return _Attention.apply(query, key, value)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        return _attend(query, key=key, value=value)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            query, key, value = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
            out = causal_attention(query, key=key, value=value)
        return torch.autograd.grad(out, (query, key, value), d_out)


def _attend(query: Tensor, *, key: Tensor, value: Tensor) -> Tensor:
    """Every row is a sequence of its own, whose keys lie in a cache of its own."""
    B, T, H, D = query.shape
    K, blocks = key.shape[2], -(-T // BLOCK)
    slabs = [_in_blocks(part, blocks=blocks) for part in (key, value)]
    step = Step([Span(slot=row, start=0, length=T, row=row * T) for row in range(B)], group=H // K)
    out = step.attend(query.reshape(B * T, H, D), keys=slabs[0], values=slabs[1], scale=D**-0.5)
    return out.view(B, T, H, D)


def _in_blocks(part: Tensor, *, blocks: int) -> Tensor:
    """[B, T, K, D] -> [B, blocks, K, BLOCK, D], as a cache keeps it; behind the last key zeros."""
    B, T, K, D = part.shape
    padded = part.new_zeros(B, blocks * BLOCK, K, D)
    padded[:, :T] = part
    return padded.view(B, blocks, BLOCK, K, D).transpose(2, 3).contiguous()


def use_cached_attention(module: nn.Module) -> None:
    """Replaces the attention of every block of a native decoder by `CachedAttention`."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is CausalAttention:
                setattr(parent, name, CachedAttention())
