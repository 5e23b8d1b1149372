"""Rotary position embedding of queries or keys, half-split or interleaved, over all or the first of the head's dimensions.

    half-split:  out[:h] = x[:h] * cos - x[h:2h] * sin         out[h:2h] = x[h:2h] * cos + x[:h] * sin
    interleaved: the same with the even elements for x[:h] and the odd ones for x[h:2h]
    dimensions past 2h are copied

The gradient is the rotation by the opposite angle. Reads and writes every element once; nothing but cos and sin is saved.

Su et al., https://arxiv.org/abs/2104.09864
"""

import torch
import triton.language as tl
from torch import Tensor

from ztk.kernels.launch.direct import is_plain
from ztk.kernels.launch.functions import OnceFunction
from ztk.kernels.launch.grids import cdiv, next_power_of_2
from ztk.kernels.launch.jit import Bound, bind, jit, kept
from ztk.kernels.launch.library import needs_reference, register
from ztk.kernels.launch.machine import Machine, machine
from ztk.kernels.shared.math import cast
from ztk.kernels.shared.spec import OpSpec, compute_dtype

NUM_WARPS = 4
PER_THREAD = 16  # elements of x: a 16-byte access of either half


@jit
def _rope(
    x_ptr, cos_ptr, sin_ptr, out_ptr, stride_b, stride_t, stride_h, M, T, H, D, HALF, table_rows,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, HAS_TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    """BLOCK_M heads: (first, second) rotated by (cos, sin), or by (cos, -sin) for the gradient"""
    i_m = tl.program_id(0).to(tl.int64)
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m = o_m < M
    o_token = o_m // H
    p_x = x_ptr + (o_token // T) * stride_b + (o_token % T) * stride_t + (o_m % H) * stride_h  # [BLOCK_M]
    p_out = out_ptr + o_m * D
    o_half = tl.arange(0, BLOCK_HALF)
    m = m_m[:, None] & (o_half < HALF)[None, :]
    p_table = (o_token % table_rows)[:, None] * HALF + o_half[None, :]
    b_cos = tl.load(cos_ptr + p_table, mask=m, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_HALF]
    b_sin = tl.load(sin_ptr + p_table, mask=m, other=0.0).to(tl.float32)
    if INVERSE:
        b_sin = -b_sin
    if INTERLEAVED:
        o_pair = tl.arange(0, 2 * BLOCK_HALF)
        m_pair = m_m[:, None] & (o_pair < 2 * HALF)[None, :]
        b_x = tl.load(p_x[:, None] + o_pair[None, :], mask=m_pair, other=0.0).to(tl.float32)
        b_first, b_second = tl.split(tl.reshape(b_x, (BLOCK_M, BLOCK_HALF, 2)))
        b_out = tl.join(b_first * b_cos - b_second * b_sin, b_second * b_cos + b_first * b_sin)
        b_out = tl.reshape(b_out, (BLOCK_M, 2 * BLOCK_HALF))
        tl.store(p_out[:, None] + o_pair[None, :], cast(b_out, out_ptr.dtype.element_ty), mask=m_pair)
    else:
        b_first = tl.load(p_x[:, None] + o_half[None, :], mask=m, other=0.0).to(tl.float32)
        b_second = tl.load(p_x[:, None] + HALF + o_half[None, :], mask=m, other=0.0).to(tl.float32)
        b_out = b_first * b_cos - b_second * b_sin
        tl.store(p_out[:, None] + o_half[None, :], cast(b_out, out_ptr.dtype.element_ty), mask=m)
        b_out = b_second * b_cos + b_first * b_sin
        tl.store(p_out[:, None] + HALF + o_half[None, :], cast(b_out, out_ptr.dtype.element_ty), mask=m)
    if HAS_TAIL:
        o_tail = 2 * HALF + tl.arange(0, BLOCK_TAIL)
        m_tail = m_m[:, None] & (o_tail < D)[None, :]
        b_tail = tl.load(p_x[:, None] + o_tail[None, :], mask=m_tail, other=0.0)
        tl.store(p_out[:, None] + o_tail[None, :], b_tail, mask=m_tail)


@kept
def _kernel_for(
    target: Machine, shape: torch.Size, strides: tuple[int, ...], table: torch.Size, interleaved: bool, inverse: bool
) -> Bound:
    """shape, strides: x's. table: the shape of cos."""
    (B, T, H, D), half = shape, table[-1]
    M, block_half = B * T * H, next_power_of_2(half)
    block_m = max(1, PER_THREAD * target.warp_size * NUM_WARPS // (2 * block_half))
    return bind(
        _rope, *strides[:3], M, T, H, D, half, table.numel() // half,
        grid=(cdiv(M, block_m),),
        INTERLEAVED=interleaved, INVERSE=inverse, HAS_TAIL=2 * half < D, BLOCK_M=block_m, BLOCK_HALF=block_half,
        BLOCK_TAIL=next_power_of_2(max(1, D - 2 * half)), num_warps=NUM_WARPS, enable_fp_fusion=True,
    )  # fmt: skip


def _launch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    shape = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel():
        kernel = _kernel_for(machine(x.device), shape, x.stride(), cos.shape, interleaved, inverse)
        kernel.launch(x, cos, sin, out)
    return out


def _cpu(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    # Three passes: everything times cos, then each half plus or minus the other times sin.
    half = cos.shape[-1]
    x32, cos32, sin32 = x.float(), cos.float(), sin.float().unsqueeze(-2)
    wide = cos32.repeat_interleave(2, dim=-1) if interleaved else torch.cat([cos32, cos32], dim=-1)
    out = torch.empty(x.shape, dtype=torch.float32, device="cpu")
    torch.mul(x32[..., : 2 * half], wide.unsqueeze(-2), out=out[..., : 2 * half])
    first, second = _halves(x32, half=half, interleaved=interleaved)
    out_first, out_second = _halves(out, half=half, interleaved=interleaved)
    sign = -1 if inverse else 1
    out_first.addcmul_(second, sin32, value=-sign)
    out_second.addcmul_(first, sin32, value=sign)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x32[..., 2 * half :]
    return out.to(x.dtype)


def _halves(x: Tensor, *, half: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The two views of [..., D] that are rotated into each other."""
    if interleaved:
        return x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    return x[..., :half], x[..., half : 2 * half]


_op = register(
    "rope(Tensor x, Tensor cos, Tensor sin, bool interleaved, bool inverse) -> Tensor",
    triton=_launch,
    cpu=_cpu,
    fake=lambda x, cos, sin, interleaved, inverse: x.new_empty(x.shape),
)


class _RoPE(OnceFunction):
    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _op(x, cos, sin, interleaved, False)

    @staticmethod
    def backward(ctx, d_out: Tensor) -> tuple[Tensor, None, None, None]:
        if d_out.stride(-1) != 1:
            d_out = d_out.contiguous()
        return _op(d_out, *ctx.saved_tensors, ctx.interleaved, True), None, None, None


def rope(x: Tensor, *, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the heads of x by their positions' angles; returns [B, T, H, D], contiguous, in the dtype of x.

    x: [B, T, H, D] with a contiguous last dimension (a slice of a fused projection will do); cos, sin: [T, h], or [B, T, h]
    where positions differ per row, contiguous, 2h <= D. Only the first 2h dimensions of each head are rotated.
    `interleaved` pairs neighbours (GPT-J, RoFormer) instead of halves (Llama, GPT-NeoX). Gradient for x; float32 inside.
    Raises ValueError for other shapes.
    """
    if x.dim() != 4 or cos.shape != sin.shape or tuple(cos.shape[:-1]) not in ((x.shape[1],), tuple(x.shape[:2])):
        raise ValueError(
            f"rope: x is {tuple(x.shape)}, cos {tuple(cos.shape)}, sin {tuple(sin.shape)}; pass x [B, T, H, D] and cos, sin "
            "[T, h] or [B, T, h]"
        )
    if 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError(f"rope: cos has {cos.shape[-1]} angles, a head of {x.shape[-1]} dimensions takes half as many")
    if needs_reference():
        return rope_reference(x, cos=cos, sin=sin, interleaved=interleaved)
    if x.stride(-1) != 1:
        x = x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    return _op(x, cos, sin, interleaved, False) if is_plain() else _RoPE.apply(x, cos, sin, interleaved)


def rope_reference(x: Tensor, *, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """The same in plain torch, float32 inside."""
    return _eager(x.to(compute_dtype(x)), cos=cos, sin=sin, interleaved=interleaved).to(x.dtype)


def _eager(x: Tensor, *, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    half = cos.shape[-1]
    c, s = cos.to(x.dtype).unsqueeze(-2), sin.to(x.dtype).unsqueeze(-2)
    first, second = _halves(x, half=half, interleaved=interleaved)
    rotated = (first * c - second * s, second * c + first * s)
    joined = torch.stack(rotated, dim=-1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1)
    return torch.cat([joined, x[..., 2 * half :]], dim=-1)


def _make_inputs(
    shape: tuple[int, ...],
    *,
    dtype: torch.dtype,
    device: str,
    interleaved: bool = False,
    partial: bool = False,
    per_row: bool = False,
) -> dict[str, object]:
    B, T, _, D = shape
    half = D // 4 if partial else D // 2
    angles = torch.rand((B, T, half) if per_row else (T, half), device=device) * 6.28
    return {
        "x": torch.randn(shape, device=device).to(dtype),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "interleaved": interleaved,
    }


SPEC = OpSpec(
    name="rope",
    op=rope,
    reference=rope_reference,
    eager=_eager,
    make_inputs=_make_inputs,
    differentiable=("x",),
    small_shapes=((1, 1, 1, 2), (2, 3, 2, 12), (2, 5, 3, 64)),
    bench_shapes=((1, 8192, 32, 128), (1, 8192, 8, 128)),
    variants=({}, {"interleaved": True}, {"per_row": True}),
    num_bytes=lambda shape, itemsize: 2 * shape[0] * shape[1] * shape[2] * shape[3] * itemsize,
    num_bytes_backward=lambda shape, itemsize: 2 * shape[0] * shape[1] * shape[2] * shape[3] * itemsize,
    num_flops=lambda shape: 3 * shape[0] * shape[1] * shape[2] * shape[3],
)
