"""The trainer's attention, bitwise equal to the inference engine's, so that answers generated with a cache have the trainer's
log-probabilities.

[Note: The cache's bits] In the native decoder in fp32 on a CPU, attention is the only operation that the inference engine computes in
another order than the trainer's
forward: norms, linear layers (a row of oneDNN's products does not depend on the number of rows), rotary embedding and activations are
bitwise equal. torch's fused attention sums over keys in blocks whose borders depend on the number of queries, and differs from position 1
of the first layer on. So the trainer computes its forward like the engine, over the same tiles of queries and blocks of keys; see
`blocks`. The gradient need not match the engine.
"""

import functools
from typing import Any

from torch import Tensor, nn

from ztk.kernels.launch.functions import OnceFunction
from ztk.nn import Documents
from ztk.nn.self_attention import CausalAttention
from ztk.rl.rollout.blocks import Blocks, Segment


class EngineAttention(CausalAttention):
    """softmax(query key^T / sqrt(D)) value over the past, fp32 on the CPU: [B, T, H, D], keys and values [B, T, K, D].

    documents: texts in a row, each with its own past or continuing another document without a past. Without documents, every row is one
    text.
    """

    def forward(self, query: Tensor, *, key: Tensor, value: Tensor, documents: Documents | None = None) -> Tensor:
        return _Attention.apply(query, key, value, documents)


class _Attention(OnceFunction):
    INSTEAD = "Use a model whose attention is ztk.nn.self_attention.CausalAttention"

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, documents: Documents | None) -> Tensor:
        (B, T, H, D), K = query.shape, key.shape[2]
        starts, continued = tuple(range(0, B * T, T)), None
        if documents is not None:
            of_rows = zip(starts, documents.starts, strict=True)
            starts, continued = tuple(row + start for row, own in of_rows for start in own), documents.continued
        blocks = _blocks(starts, continued, B * T, K, H // K, D)
        rows = [x.flatten(0, 1) for x in (query, key, value)]
        out, lse = blocks.attend(rows[0], key=rows[1], value=rows[2])
        ctx.save_for_backward(*rows, out, lse)
        ctx.blocks, ctx.shapes = blocks, [x.shape for x in (query, key, value)]
        return out.view(query.shape)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        found = ctx.blocks.gradients(d_out.reshape(query.shape), query=query, key=key, value=value, out=out, lse=lse)
        return *(part.view(shape) for part, shape in zip(found, ctx.shapes, strict=True)), None


@functools.lru_cache(maxsize=2)  # shared by the layers of a forward, and for rows by all forwards
def _blocks(
    starts: tuple[int, ...], continued: tuple[int, ...] | None, total: int, kv_heads: int, group: int, head_dim: int
) -> Blocks:
    """Returns the blocks. starts: first tokens of consecutive documents. total: tokens of all. continued: the same as in `Documents`.
    group: query heads per key head.
    """
    lengths = [end - start for start, end in zip(starts, (*starts[1:], total), strict=True)]
    segments = []
    for number, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        first = -1 if continued is None else continued[number]
        border, before = (0, 0) if first < 0 else (lengths[first], starts[first])
        segments.append(Segment(row=start, length=length, start=border, border=border, before=before))
    return Blocks(segments, tokens=total, kv_heads=kv_heads, group=group, head_dim=head_dim)


def use_engine_attention(module: nn.Module) -> None:
    """Replaces the attention of every block of a native decoder by `EngineAttention`."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is CausalAttention:
                setattr(parent, name, EngineAttention())


def has_engine_attention(module: nn.Module) -> bool:
    """Returns whether all attention of the module is the engine's, so that texts are packed without a change of bits."""
    attends = [part for part in module.modules() if isinstance(part, CausalAttention)]
    return bool(attends) and all(isinstance(part, EngineAttention) for part in attends)
