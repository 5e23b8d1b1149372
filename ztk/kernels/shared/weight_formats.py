"""Weights of inference as bytes, and how a kernel reads a tile of them.

    plain   [N, K] of x's dtype
    int8    int8 [N, K], w = scale[n] q                                scales [N]
    fp8     uint8 [N, K], w = scale[n] e4m3(q)                         scales [N]
    int4    uint8 [N, K / 2], w = scale[g, n] (q - 8) + zero[g, n]     scales bf16 [K / 32, N, 2], of groups g of 32 inputs

A byte of int4 has input i of its block of 128 in the lower half and input 64 + i in the upper one. All may have a first dimension of
experts. K is the weight's: int4 rows are padded to full blocks, and x ends before them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ztk.kernels.shared.fitting import GROUP, fit_weight
from ztk.kernels.shared.fp8 import LARGEST, decode_fp8, from_fp8, to_fp8
from ztk.kernels.shared.math import INTERPRETED

BLOCK = 128  # inputs whose int4 steps share 64 bytes
_GROUP = tl.constexpr(GROUP)


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


def quantise_weight(
    weight: Tensor, *, kind: str, moments: Tensor | None = None, largest: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """float weight [.., N, K] in the format `kind`: the bytes, and the scales, bfloat16 for int4 and else float32. Rounded to nearest, or int4
    of one weight [N, K] with the second moments of its inputs as in `fit_weight`.

    largest: float32 [.., N], the largest absolute values of full rows of which `weight` has some columns, for int8 and fp8.

    Raises:
        ValueError: `kind` is no format.
    """
    if kind == "plain":
        return weight.contiguous(), None
    wide = weight.float()
    if kind == "int4":
        return _quantise_int4(wide, moments=moments)
    if kind not in ("int8", "fp8"):
        raise ValueError(f"{kind} is no format of weights: plain, int8, fp8 or int4")
    largest = wide.abs().amax(-1) if largest is None else largest
    scales = (largest / (127 if kind == "int8" else LARGEST)).clamp(min=torch.finfo(torch.float32).tiny)
    steps = wide / scales.unsqueeze(-1)
    return (steps.round_().clamp_(-127, 127).to(torch.int8) if kind == "int8" else to_fp8(steps)), scales


def _quantise_int4(wide: Tensor, *, moments: Tensor | None) -> tuple[Tensor, Tensor]:
    wide = torch.nn.functional.pad(wide, (0, -wide.shape[-1] % BLOCK))
    steps, scales = fit_weight(wide, moments=moments)
    low, high = steps.flatten(-2).unflatten(-1, (-1, 2, BLOCK // 2)).unbind(-2)
    return (low | high << 4).flatten(-2).contiguous(), scales.transpose(-2, -3).contiguous()  # [.., groups, N, 2]


def widen(weight: Tensor, *, scales: Tensor | None, columns: int) -> Tensor:
    """The weights [.., N, columns] that the bytes stand for, in float32, or float64 where they or their scales are."""
    kind = format_of(weight, scales)
    if kind == "plain" or scales is None:
        return weight if weight.dtype == torch.float64 else weight.float()
    dtype = torch.float64 if scales.dtype == torch.float64 else torch.float32
    scales = scales.to(dtype)
    if kind != "int4":
        return (weight if kind == "int8" else from_fp8(weight)).to(dtype) * scales.unsqueeze(-1)
    halves = weight.unflatten(-1, (-1, BLOCK // 2))
    steps = torch.cat([halves & 15, halves >> 4], dim=-1).to(dtype) - 8  # [.., N, blocks, 128]
    steps = steps.flatten(-2).unflatten(-1, (-1, GROUP))
    scale, zero = scales.transpose(-2, -3).unsqueeze(-2).unbind(-1)  # [.., N, groups, 1]
    return (steps * scale + zero).flatten(-2)[..., :columns]


@triton.jit
def load_steps(p_w, mask, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """A tile of plain weights, or of unscaled steps, exact in DTYPE (1/256 of the value for fp8)"""
    b_w = tl.load(p_w, mask=mask, other=0)
    if FORMAT == "fp8":
        b_w = decode_fp8(b_w, False)
    if FORMAT == "int8" and INTERPRETED:
        b_w = b_w.to(tl.float32)  # the interpreter would reinterpret an integer's bits as bfloat16
    return b_w.to(DTYPE)


@triton.jit
def load_int4(p_w, mask, p_scale, m_scale, stride_g, GROUPS: tl.constexpr, TRANSPOSED: tl.constexpr):
    """float32 weights of the lower and the upper halves of a tile of int4 bytes of half a block: [inputs, outputs], TRANSPOSED [outputs,
    inputs]. p_scale: [outputs], pointers to the scales of the first group; m_scale: their mask; stride_g: distance to the next group's."""
    b_w = tl.load(p_w, mask=mask, other=0)
    b_low, b_high = (b_w & 15).to(tl.float32) - 8.0, (b_w >> 4).to(tl.float32) - 8.0
    b_low *= _spread(p_scale, m_scale, stride_g, 0, GROUPS, TRANSPOSED)
    b_low += _spread(p_scale + 1, m_scale, stride_g, 0, GROUPS, TRANSPOSED)
    b_high *= _spread(p_scale, m_scale, stride_g, GROUPS, GROUPS, TRANSPOSED)
    b_high += _spread(p_scale + 1, m_scale, stride_g, GROUPS, GROUPS, TRANSPOSED)
    return b_low, b_high


@triton.jit
def _spread(p_scale, mask, stride_g, FIRST: tl.constexpr, GROUPS: tl.constexpr, TRANSPOSED: tl.constexpr):
    """float32 scales of GROUPS groups from FIRST on, of every input"""
    o_g = (tl.arange(0, GROUPS) + FIRST).to(tl.int64) * stride_g
    size: tl.constexpr = GROUPS * _GROUP
    outputs: tl.constexpr = p_scale.shape[0]
    if TRANSPOSED:
        b_s = tl.load(p_scale[:, None] + o_g[None, :], mask=mask[:, None], other=0.0).to(tl.float32)
        return tl.reshape(tl.broadcast_to(b_s[:, :, None], [outputs, GROUPS, _GROUP]), [outputs, size])
    else:
        b_s = tl.load(p_scale[None, :] + o_g[:, None], mask=mask[None, :], other=0.0).to(tl.float32)
        return tl.reshape(tl.broadcast_to(b_s[:, None, :], [GROUPS, _GROUP, outputs]), [size, outputs])


@triton.jit
def scale_of(scales_ptr, o_n, m_n, FORMAT: tl.constexpr):
    """float32 [BLOCK_N]: the factor on an output's sum over all its inputs"""
    if FORMAT == "fp8":
        return tl.load(scales_ptr + o_n, mask=m_n, other=0.0).to(tl.float32) * 256.0
    elif FORMAT == "int8":
        return tl.load(scales_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
    else:
        return tl.full(o_n.shape, 1.0, tl.float32)
