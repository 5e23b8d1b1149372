"""Operations on rows, without autograd and registration, which cost more than the operation itself when a step has few rows.

The same formulas as the CPU implementations of `ztk.kernels`. Results have the dtype of their inputs.
"""

import functools

import torch
from torch import Tensor

_COLUMNS, _AT_ONCE = 64, 512  # of `share`: as much as torch gives one thread


def rms_norm(x: Tensor, *, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, fp32: x [M, N], weight [N] -> [M, N]."""
    rstd = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    rstd.mul_(rstd).div_(constant(x.shape[-1])).add_(constant(eps)).rsqrt_()
    return (x * rstd).mul_(weight)


@functools.cache
def constant(value: float) -> Tensor:
    """fp32 []: a number of Python's is converted in every operation, which takes as long as a small one: 4 us of 7, of a column of 32."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=torch.float32)


def turns(table: tuple[Tensor, Tensor], *, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Arguments of `rope` for positions int64 [M], from a rotary table, (cosine, sine) [any, R / 2] each: fp32 [M, 1, R] each."""
    cos, sin = (part.index_select(0, positions).unsqueeze(1) for part in table)
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rope(x: Tensor, *, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [M, heads, D] by `turns` [M, 1, R]; the last D - R of each head stay."""
    R = cos.shape[-1]
    if x.shape[-1] == R:
        return (x * cos).addcmul_(x.roll(R // 2, -1), sin)
    out, first = torch.empty_like(x), x[..., :R]
    torch.mul(first, cos, out=out[..., :R]).addcmul_(first.roll(R // 2, -1), sin)
    out[..., R:] = x[..., R:]
    return out


def share(logits: Tensor) -> Tensor:
    """sigmoid of a column, [M, 1] -> [M, 1]. In rows of 64: the last elements of a tensor take another path of the vectorised code, so
    that an element's bits would depend on the number of rows."""
    parts = (torch.sigmoid(rows.expand(-1, _COLUMNS).contiguous())[:, :1] for rows in logits.split(_AT_ONCE))
    return torch.cat(list(parts))
