"""Operations on rows, without autograd and registration, which cost more than the operation itself when a step has few rows.

The same formulas as the CPU implementations of `ztk.kernels`. Results have the dtype of their inputs.
"""

import torch
from torch import Tensor

_COLUMNS, _AT_ONCE = 64, 512  # of `share`: as much as torch gives one thread


def rms_norm(x: Tensor, *, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, fp32: x [M, N], weight [N] -> [M, N]."""
    rstd = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    rstd.mul_(rstd).div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * rstd).mul_(weight)


def rope(x: Tensor, *, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [M, heads, D] by cos and sin [M, R / 2]; the last D - R of each head stay."""
    half = cos.shape[1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x[..., :half], x[..., half : 2 * half]
    out = torch.empty_like(x)
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half : 2 * half]).addcmul_(first, sin)
    if x.shape[-1] > 2 * half:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out


def share(logits: Tensor) -> Tensor:
    """sigmoid of a column, [M, 1] -> [M, 1]. In rows of 64: the last elements of a tensor take another path of the vectorised code, so
    that an element's bits would depend on the number of rows."""
    parts = (torch.sigmoid(rows.expand(-1, _COLUMNS).contiguous())[:, :1] for rows in logits.split(_AT_ONCE))
    return torch.cat(list(parts))
