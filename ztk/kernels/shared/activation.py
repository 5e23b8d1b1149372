"""Activations of MLPs by name, in kernels and in torch."""

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ztk.kernels.shared.cpu import GRAIN, even_cuts

ACTIVATIONS = ("none", "silu", "relu", "gelu", "gelu_tanh")
_INVERSE_SQRT_2 = tl.constexpr(0.5**0.5)
_TWICE_SQRT_2_OVER_PI = tl.constexpr(2 * (2 / math.pi) ** 0.5)


@triton.jit
def activate(b_x, ACTIVATION: tl.constexpr):
    """act(x) of float32 x; gelu with erf, gelu_tanh(x) = x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))"""
    if ACTIVATION == "silu":
        return b_x * tl.sigmoid(b_x)
    elif ACTIVATION == "relu":
        return tl.where(b_x < 0.0, 0.0, b_x)  # NaN stays
    elif ACTIVATION == "gelu":
        return 0.5 * b_x * (1.0 + tl.erf(b_x * _INVERSE_SQRT_2))
    elif ACTIVATION == "gelu_tanh":
        return b_x * tl.sigmoid((b_x + 0.044715 * b_x * b_x * b_x) * _TWICE_SQRT_2_OVER_PI)
    else:
        return b_x


def activate_cpu(x: Tensor, *, activation: str) -> Tensor:
    """act(x) in x's dtype, any shape; no gradient. On a CPU an element's bits do not depend on how many others there are before full vectors.

    activation: one of `ACTIVATIONS`; none is x itself.
    """
    if activation == "none":
        return x
    if activation == "relu":
        return torch.relu(x)
    is_silu, approximate = activation == "silu", "tanh" if activation == "gelu_tanh" else "none"
    if x.device.type != "cpu" or x.numel() <= (GRAIN if is_silu else GRAIN // 2):  # one thread has all
        return F.silu(x) if is_silu else F.gelu(x, approximate=approximate)
    out = torch.empty(x.shape, dtype=x.dtype)
    flat, results = x.reshape(-1), out.view(-1)
    for cut in even_cuts(x.numel(), among_all=not is_silu):
        if is_silu:
            torch.ops.aten.silu.out(flat[cut], out=results[cut])
        else:
            torch.ops.aten.gelu.out(flat[cut], approximate=approximate, out=results[cut])
    return out
