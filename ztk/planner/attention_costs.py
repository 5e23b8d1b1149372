"""Attention in a plan: torch's fused kernel by its shapes, and the operations of ztk's kernel.

On the meta device `scaled_dot_product_attention` uses the variant that stores the full square of scores, which no GPU runs. The fused one
keeps its inputs, its output and a number per query and head. If the model has its own mask, a plan counts the square.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from ztk.kernels import operator

_torch_attention = F.scaled_dot_product_attention


@contextmanager
def fused_attention() -> Iterator[None]:
    """Context in which attention without a mask over planned tensors is torch's flash kernel.

    The function is replaced, because a mode over torch's functions is off inside a backward, where recomputation runs forwards.
    """
    with mock.patch.object(F, "scaled_dot_product_attention", _attention):
        yield


def _forward_flops(q: Tensor, *others: object, **_: object) -> int:
    """FLOPs for (q, k, v, cu_seqlens, T, ...): two products of every query with T keys. Masked pairs count, as in torch."""
    T = others[3]
    assert isinstance(T, int)
    return 4 * T * q.numel()


def _backward_flops(d_out: Tensor, q: Tensor, *others: object, **_: object) -> int:
    """FLOPs for (d_out, q, k, v, out, lse, cu_seqlens, T, ...): five products."""
    T = others[5]
    assert isinstance(T, int)
    return 10 * T * q.numel()


FLOPS = {operator("attention"): _forward_flops, operator("attention_backward"): _backward_flops}


def _attention(  # noqa: PLR0917 - as torch is called
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if attn_mask is not None or not query.is_meta:
        return _torch_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    fused = torch.ops.aten._scaled_dot_product_flash_attention
    return fused(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
