"""Weights of inference as bytes, and how a kernel reads a tile of them.

    plain   [N, K] of x's dtype
    int8    int8 [N, K], w = scale[n] q                                scales [N]
    fp8     uint8 [N, K], w = scale[n] e4m3(q)                         scales [N]
    int4    uint8 [N, K / 2], w = scale[g, n] (q - 8) + zero[g, n]     scales [K / 128, N, 2], of groups g of 128 inputs

A byte of int4 has input i of its group in the lower half and input 64 + i in the upper one. All may have a first dimension of
experts. K is that of the weight: int4 rows are padded to full groups, and x ends before them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ztk.kernels.shared.fp8 import LARGEST, decode_fp8, from_fp8, to_fp8
from ztk.kernels.shared.math import INTERPRETED

GROUP = 128  # inputs that share a scale and a zero in int4


def format_of(weight: Tensor, scales: Tensor | None) -> str:
    """plain, int8, fp8 or int4 of weight [.., N, K] or [.., N, K / 2], as in the module's docstring.

    Raises:
        ValueError: a dtype that is no format, or scales that do not belong to it.
    """
    if weight.is_floating_point() and scales is None:
        return "plain"
    if scales is not None:
        *lead, out, columns = weight.shape
        if weight.dtype in (torch.int8, torch.uint8) and list(scales.shape) == [*lead, out]:
            return "int8" if weight.dtype == torch.int8 else "fp8"
        if weight.dtype == torch.uint8 and list(scales.shape) == [*lead, 2 * columns // GROUP, out, 2]:
            return "int4"
    found = "no scales" if scales is None else f"scales {tuple(scales.shape)}"
    raise ValueError(
        f"weight {tuple(weight.shape)} {weight.dtype} with {found} is no format: floats without scales, int8 or fp8 (uint8) with one "
        f"per output, or int4 (two in a uint8) with [groups of {GROUP}, outputs, 2]"
    )


def quantise_weight(weight: Tensor, *, kind: str) -> tuple[Tensor, Tensor | None]:
    """float weight [.., N, K] in the format `kind`: the bytes, and the float32 scales. Rounded to nearest.

    Raises:
        ValueError: `kind` is no format.
    """
    if kind == "plain":
        return weight.contiguous(), None
    wide = weight.float()
    if kind == "int4":
        return _quantise_int4(wide)
    if kind not in ("int8", "fp8"):
        raise ValueError(f"{kind} is no format of weights: plain, int8, fp8 or int4")
    scales = (wide.abs().amax(-1) / (127 if kind == "int8" else LARGEST)).clamp(min=torch.finfo(torch.float32).tiny)
    steps = wide / scales.unsqueeze(-1)
    return (steps.round_().clamp_(-127, 127).to(torch.int8) if kind == "int8" else to_fp8(steps)), scales


def _quantise_int4(wide: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.nn.functional.pad(wide, (0, -wide.shape[-1] % GROUP))
    groups = wide.unflatten(-1, (-1, GROUP))
    least, greatest = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = ((greatest - least) / 15).clamp(min=torch.finfo(torch.float32).tiny)
    zero = least + 8 * scale
    steps = ((groups - zero) / scale).round_().add_(8).clamp_(0, 15).to(torch.uint8)
    low, high = steps.unflatten(-1, (2, GROUP // 2)).unbind(-2)
    scales = torch.cat([scale, zero], dim=-1).transpose(-2, -3).contiguous()  # [.., groups, N, 2]
    return (low | high << 4).flatten(-2).contiguous(), scales


def widen(weight: Tensor, *, scales: Tensor | None, columns: int) -> Tensor:
    """The weights [.., N, columns] that the bytes stand for, in float32, or float64 where they or their scales are."""
    kind = format_of(weight, scales)
    if kind == "plain" or scales is None:
        return weight if weight.dtype == torch.float64 else weight.float()
    dtype = torch.float64 if scales.dtype == torch.float64 else torch.float32
    scales = scales.to(dtype)
    if kind != "int4":
        return (weight if kind == "int8" else from_fp8(weight)).to(dtype) * scales.unsqueeze(-1)
    halves = weight.unflatten(-1, (-1, GROUP // 2))
    steps = torch.cat([halves & 15, halves >> 4], dim=-1).to(dtype) - 8  # [.., N, groups, 128]
    scale, zero = scales.transpose(-2, -3).unsqueeze(-2).unbind(-1)  # [.., N, groups, 1]
    return (steps * scale + zero).flatten(-2)[..., :columns]


@triton.jit
def load_steps(p_w, mask, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """A tile of plain weights, or of what the scale multiplies, exact in DTYPE (of fp8 a 256th)"""
    b_w = tl.load(p_w, mask=mask, other=0)
    if FORMAT == "fp8":
        b_w = decode_fp8(b_w, False)
    if FORMAT == "int8" and INTERPRETED:
        b_w = b_w.to(tl.float32)  # the interpreter takes the bits of an integer for those of a bfloat16
    return b_w.to(DTYPE)


@triton.jit
def scale_of(scales_ptr, o_n, m_n, FORMAT: tl.constexpr):
    """float32 [BLOCK_N]: what the sum of an output is multiplied with, after all its inputs"""
    if FORMAT == "fp8":
        return tl.load(scales_ptr + o_n, mask=m_n, other=0.0).to(tl.float32) * 256.0
    elif FORMAT == "int8":
        return tl.load(scales_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
    else:
        return tl.full(o_n.shape, 1.0, tl.float32)
