"""Attention for training: causal or full, grouped-query, sliding-window, and packed sequences of different lengths.

    S = scale * Q K^T with the invisible entries at -inf,   P = softmax(S),   out = P V,   lse = log sum exp S

Key j is visible to query i of the same sequence when j <= i (causal) and j > i - window (window). Query head h reads key
head h // (H / H_kv). Forward walks the visible key blocks once with an online softmax and keeps only lse for backward; blocks
that are visible to every row of the tile skip the mask, and invisible blocks are never loaded. Backward recomputes P: see
`attention_backward`. FLOPs: forward 4 D per visible (query, key) pair and head, backward 10 D.

Sequences are packed as [tokens, heads, D] inside; a batch [B, T, H, D] is B sequences of T tokens. Offsets are int64 per
sequence and block, int32 only inside a tile. A library computes instead where it is faster (`ztk.kernels.shared.attention_choice`).

Dao, FlashAttention-2, https://arxiv.org/abs/2307.08691
"""

import itertools
import math

import torch
import triton.language as tl
from torch import Tensor

from ztk.kernels.launch.functions import OnceFunction
from ztk.kernels.launch.grids import cdiv, next_power_of_2
from ztk.kernels.launch.jit import Bound, bind, jit, kept
from ztk.kernels.launch.library import needs_reference, register
from ztk.kernels.launch.machine import Machine, machine
from ztk.kernels.launch.memory import Memory, maker, memory_of
from ztk.kernels.ops.attention_backward import backward
from ztk.kernels.shared import attention_choice
from ztk.kernels.shared.attention_tiles import (
    Part,
    batch_view,
    cpu_mask,
    cpu_sequences,
    key_range,
    program_place,
    sequence_bounds,
    tiles_for,
    visible,
)
from ztk.kernels.shared.math import cast, dot
from ztk.kernels.shared.spec import FLOAT_DTYPES, OpSpec, compute_dtype

MAX_HEAD_DIM = 256
LOG2E = math.log2(math.e)
_LOG2E = tl.constexpr(LOG2E)
_LN2 = tl.constexpr(math.log(2))


@jit(do_not_specialize=["T", "window"])  # one token, or a window of one, is no other kernel
def _attention_fwd(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, cu_seqlens_ptr, q_stride, k_stride, v_stride, num_tokens, T, window, scale,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """out = softmax(scale * Q K^T) V and lse for one block of queries of one head"""
    i_bh, i_block, num_blocks = program_place(T, BLOCK_M)
    i_h = i_bh % H
    start, length = sequence_bounds(cu_seqlens_ptr, i_bh // H, T)
    if CAUSAL:
        i_block = num_blocks - 1 - i_block  # the longest rows first, so that the last programs are short
    i_row = (i_block * BLOCK_M).to(tl.int32)
    if i_row < length:
        o_m = i_row + tl.arange(0, BLOCK_M)
        o_d = tl.arange(0, BLOCK_D)
        m_m = o_m < length
        o_q = (start + o_m)[:, None] * q_stride + i_h * D + o_d[None, :]
        b_q = tl.load(q_ptr + o_q, mask=m_m[:, None] & (o_d < D)[None, :], other=0.0)
        b_acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        b_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
        b_max = tl.full([BLOCK_M], -1e30, dtype=tl.float32)  # finite, so that a fully masked block does not change it
        scale_log2 = scale * _LOG2E
        i_kv = i_h // GROUP
        o_block = tl.arange(0, BLOCK_N)
        k_step = tl.cast(k_stride, tl.int32)  # inside a tile 32 bits are enough and take half the registers
        v_step = tl.cast(v_stride, tl.int32)
        first, first_full, last_full, last = key_range(
            i_row, length, window, CAUSAL, HAS_WINDOW, BLOCK_M, BLOCK_N
        )  # fmt: skip
        for i_n in range(first, last, BLOCK_N):
            o_n = i_n + o_block
            i_key = start + i_n
            m_n = o_n < length
            p_k = k_ptr + i_key * k_stride + i_kv * D
            p_v = v_ptr + i_key * v_stride + i_kv * D
            m_dn = (o_d < D)[:, None] & m_n[None, :]
            b_k = tl.load(p_k + (o_block[None, :] * k_step + o_d[:, None]), mask=m_dn, other=0.0)
            b_s = dot(b_q, b_k, tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32))  # [BLOCK_M, BLOCK_N], not scaled yet
            if (i_n < first_full) | (i_n >= last_full):
                m_mn = visible(o_m[:, None], o_n[None, :], length, window, CAUSAL, HAS_WINDOW)
                b_s = tl.where(m_mn, b_s, float("-inf"))
            b_new = tl.maximum(b_max, tl.max(b_s, axis=1) * scale_log2)
            b_p = tl.exp2(b_s * scale_log2 - b_new[:, None])  # one multiply-add per score
            b_shrink = tl.exp2(b_max - b_new)
            b_sum = b_sum * b_shrink + tl.sum(b_p, axis=1)
            m_nd = m_n[:, None] & (o_d < D)[None, :]
            b_v = tl.load(p_v + (o_block[:, None] * v_step + o_d[None, :]), mask=m_nd, other=0.0)
            b_acc = dot(cast(b_p, b_v.dtype), b_v, b_acc * b_shrink[:, None])
            b_max = b_new

        b_sum = tl.where(m_m, b_sum, 1.0)
        o_out = (start + o_m)[:, None] * (H * D) + i_h * D + o_d[None, :]
        b_out = cast(b_acc / b_sum[:, None], out_ptr.dtype.element_ty)
        tl.store(out_ptr + o_out, b_out, mask=m_m[:, None] & (o_d < D)[None, :])
        tl.store(lse_ptr + i_h * num_tokens + start + o_m, (b_max + tl.log2(b_sum)) * _LN2, mask=m_m)


@kept
def _forward_for(
    target: Machine, tokens: int, H: int, D: int, dtype: torch.dtype, H_kv: int, q_stride: int, k_stride: int, v_stride: int,
    num_packed: int | None, T: int, causal: bool, window: int, scale: float,
) -> tuple[Bound, Memory, Memory]:  # fmt: skip
    """Returns the bound kernel and the memory of out and lse. num_packed: number of sequences, or None if all have T tokens."""
    tiles = tiles_for(Part.forward, head_dim=D, itemsize=dtype.itemsize, architecture=target.architecture)
    num_sequences = (tokens // T if tokens else 0) if num_packed is None else num_packed
    bound = bind(
        _attention_fwd, q_stride, k_stride, v_stride, tokens, T, window, scale,
        grid=(cdiv(T, tiles.held) * num_sequences * H,), H=H, GROUP=H // H_kv, D=D, BLOCK_D=max(16, next_power_of_2(D)),
        BLOCK_M=tiles.held, BLOCK_N=tiles.step, CAUSAL=causal, HAS_WINDOW=window > 0, num_warps=tiles.num_warps,
        num_stages=tiles.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    return bound, memory_of(tokens, H, D, dtype=dtype), memory_of(H, tokens, dtype=torch.float32)


def _launch_fwd(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, T: int, causal: bool, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    given = (q, k, v, cu_seqlens, T, causal, window, scale)
    if attention_choice.is_open(q):
        chosen = attention_choice.choose(
            "forward", given, q=q, k=k, cu_seqlens=cu_seqlens, T=T, causal=causal, window=window, own=_launch_own_fwd, others=_LIBRARIES
        )  # fmt: skip
        if chosen != attention_choice.OWN:
            return _LIBRARIES[chosen](*given)
    return _launch_own_fwd(*given)


def _launch_own_fwd(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, T: int, causal: bool, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    (tokens, H, D), num_packed = q.shape, None if cu_seqlens is None else cu_seqlens.numel() - 1
    forward, like_q, per_row = _forward_for(
        machine(q.device), tokens, H, D, q.dtype, k.shape[1], q.stride()[0], k.stride()[0], v.stride()[0], num_packed, T, causal, window,
        scale,
    )  # fmt: skip
    make = maker(q)
    out, lse = make(*like_q), make(*per_row)
    if tokens:
        forward.launch(q, k, v, out, lse, cu_seqlens)
    return out, lse


def _flash_fwd(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, T: int, causal: bool, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    sizes = attention_choice.flash_sizes(q, cu_seqlens=cu_seqlens, T=T, causal=causal, window=window)
    out, lse, *_ = attention_choice.flash()._flash_attn_forward(q, k, v, **sizes, softmax_scale=scale, causal=causal)
    return out, lse


def _cudnn_fwd(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, T: int, causal: bool, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    tokens, H, D = q.shape
    views = (batch_view(x, first=0, count=tokens // T, T=T) for x in (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(*views, None, True, 0.0, causal, scale=scale)
    # [sequences, H, T, D] and [sequences, H, T] or [sequences, H, T, 1]
    return out.transpose(1, 2).reshape(tokens, H, D), lse.reshape(-1, H, T).transpose(0, 1).reshape(H, tokens)


_LIBRARIES = {attention_choice.FLASH: _flash_fwd, attention_choice.CUDNN: _cudnn_fwd}


def _cpu_fwd(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, T: int, causal: bool, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    tokens, H, _ = q.shape
    out, lse = torch.empty(q.shape, dtype=q.dtype), torch.empty(H, tokens)
    for first, count, length in cpu_sequences(tokens, cu_seqlens=cu_seqlens, T=T) if tokens else ():
        views = (batch_view(x, first=first, count=count, T=length) for x in (q, k, v))
        mask = cpu_mask(length, window=window, dtype=q.dtype)
        part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *views, 0.0, causal and mask is None, attn_mask=mask, scale=scale
        )
        batch_view(out, first=first, count=count, T=length).copy_(part)
        lse[:, first : first + count * length].unflatten(1, (count, length)).copy_(part_lse.transpose(0, 1))
    return out, lse


_forward = register(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens, int T, bool causal, int window, float scale)"
    " -> (Tensor, Tensor)",
    triton=_launch_fwd,
    cpu=_cpu_fwd,
    fake=lambda q, k, v, cu_seqlens, T, causal, window, scale: (
        q.new_empty(q.shape),
        q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32),
    ),  # fmt: skip
)


class _Attention(OnceFunction):
    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens, T, causal, window, scale):
        out, lse = _forward(q, k, v, cu_seqlens, T, causal, window, scale)
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens)
        ctx.options = (T, causal, window, scale)
        return out

    @staticmethod
    def backward(ctx, d_out):
        q, k, v, out, lse, cu_seqlens = ctx.saved_tensors
        d_q, d_k, d_v = backward(d_out.contiguous(), q, k, v, out, lse, cu_seqlens, *ctx.options)
        return d_q, d_k, d_v, None, None, None, None, None


def _validate(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int, scale: float | None) -> None:
    H, D = q.shape[-2:]
    if k.shape != v.shape or q.shape[:-2] != k.shape[:-2] or k.shape[-1] != D or k.shape[-2] == 0 or H % k.shape[-2]:
        raise ValueError(
            f"attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} must agree in all but the head "
            "dimension, where k and v must agree and divide q"
        )
    if not (q.dtype == k.dtype == v.dtype) or q.dtype not in FLOAT_DTYPES:
        raise ValueError(f"attention: q {q.dtype}, k {k.dtype}, v {v.dtype} must be one of float32, float16, bfloat16")
    if D > MAX_HEAD_DIM:
        raise ValueError(f"attention: head dimension {D} is above {MAX_HEAD_DIM}; use set_backend('reference')")
    if scale is not None and not scale > 0:
        raise ValueError(f"attention: scale={scale} must be positive; negate q instead")
    if window < 0 or (window and not causal):
        raise ValueError(f"attention: window={window} must be 0 (off) or positive with causal=True")


def _packed(x: Tensor) -> Tensor:
    """[tokens, heads, D] whose heads are dense; slices of a fused projection pass as they are."""
    x = x.flatten(0, -3)
    return x if x.stride(-1) == 1 and x.stride(-2) == x.shape[-1] else x.contiguous()


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, window: int = 0, scale: float | None = None
) -> Tensor:
    """softmax(scale * q k^T) v over a batch of sequences of one length, with gradients for q, k and v.

    q: [B, T, H, D]; k, v: [B, T, H_kv, D], H a multiple of H_kv; float32, float16 or bfloat16, D at most 256. `window` w > 0
    lets a token attend to itself and the w - 1 before it. `scale` defaults to D ** -0.5. Returns [B, T, H, D].
    """
    _validate(q, k, v, causal=causal, window=window, scale=scale)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if needs_reference():
        return attention_reference(q, k, v, causal=causal, window=window, scale=scale)
    out = _Attention.apply(*(_packed(x) for x in (q, k, v)), None, q.shape[1], causal, window, scale)
    return out.view(q.shape)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    causal: bool = True,
    window: int = 0,
    scale: float | None = None,
) -> Tensor:
    """`attention` inside each of the sequences packed one after another.

    q: [tokens, H, D]; k, v: [tokens, H_kv, D]; cu_seqlens: int32 [sequences + 1] on the same device, 0 first and `tokens`
    last; max_seqlen: at least the longest length, known to the host. Returns [tokens, H, D].
    Raises ValueError for other shapes, dtypes and devices.
    """
    _validate(q, k, v, causal=causal, window=window, scale=scale)
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.device != q.device:
        raise ValueError(
            f"attention_varlen: cu_seqlens {tuple(cu_seqlens.shape)} {cu_seqlens.dtype} on {cu_seqlens.device} must be "
            f"int32 [sequences + 1] on {q.device}"
        )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if needs_reference():
        return attention_varlen_reference(
            q, k, v, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, causal=causal, window=window, scale=scale
        )
    rows = (_packed(x) for x in (q, k, v))
    return _Attention.apply(*rows, cu_seqlens.contiguous(), max_seqlen, causal, window, scale)


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, window: int = 0, scale: float | None = None
) -> Tensor:
    """softmax(scale * q k^T) v in float32 with the full score matrix, rounded once."""
    wide = (x.to(compute_dtype(q)) for x in (q, k, v))
    return _eager(*wide, causal=causal, window=window, scale=scale).to(q.dtype)


def attention_varlen_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    causal: bool = True,
    window: int = 0,
    scale: float | None = None,
) -> Tensor:
    """`attention_reference` sequence by sequence."""
    sizes = cu_seqlens.diff().tolist()
    assert max(sizes, default=0) <= max_seqlen, f"max_seqlen={max_seqlen} is below the longest of {sizes}"
    parts = zip(*(x.split(sizes) for x in (q, k, v)), strict=True)
    options = {"causal": causal, "window": window, "scale": scale}
    return torch.cat([attention_reference(*(x[None] for x in part), **options)[0] for part in parts])


def _eager(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, window: int = 0, scale: float | None = None
) -> Tensor:
    T, group = q.shape[1], q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    distance = torch.arange(T, device=q.device)[:, None] - torch.arange(T, device=q.device)[None, :]
    hidden = (distance < 0) if causal else torch.zeros_like(distance, dtype=torch.bool)
    if window:
        hidden = hidden | (distance >= window)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    p = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("bhij,bjhd->bihd", p, v)


def _make_inputs(shape, *, dtype, device, causal=True, window=0, group=1) -> dict[str, object]:
    B, T, H, D = shape

    def normal(heads):
        return torch.randn(B, T, heads, D, dtype=dtype, device=device)

    return {
        "q": normal(H), "k": normal(H // group), "v": normal(H // group), "causal": causal, "window": window,
    }  # fmt: skip


def _varlen_lengths(tokens: int) -> list[int]:
    """A short, an empty, a middle and a long sequence."""
    short, middle = tokens // 7, tokens // 7 * 2 + 1 if tokens > 7 else 0
    return [short, 0, middle, tokens - short - middle]


def _make_varlen_inputs(shape, *, dtype, device, causal=True, window=0) -> dict[str, object]:
    tokens, H, D = shape
    lengths = _varlen_lengths(tokens)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    q, k, v = (torch.randn(tokens, h, D, dtype=dtype, device=device) for h in (H, max(1, H // 2), max(1, H // 2)))
    return {
        "q": q, "k": k, "v": v, "cu_seqlens": cu_seqlens, "max_seqlen": max(lengths), "causal": causal, "window": window,
    }  # fmt: skip


def _visible_pairs(shape) -> int:
    return shape[0] * shape[1] * (shape[1] + 1) // 2 * shape[2]


SPEC = OpSpec(
    name="attention",
    op=attention,
    reference=attention_reference,
    eager=_eager,
    make_inputs=_make_inputs,
    differentiable=("q", "k", "v"),
    small_shapes=((2, 17, 2, 16), (1, 35, 2, 24)),
    bench_shapes=((4, 8192, 32, 128), (16, 2048, 32, 128), (4, 8192, 32, 64)),
    variants=({}, {"group": 2}, {"window": 9, "group": 2}, {"causal": False}),
    num_bytes=lambda shape, itemsize: 4 * shape[0] * shape[1] * shape[2] * shape[3] * itemsize,
    num_bytes_backward=lambda shape, itemsize: 8 * shape[0] * shape[1] * shape[2] * shape[3] * itemsize,
    num_flops=lambda shape: 4 * _visible_pairs(shape) * shape[3],
    tolerance_ulps=4.0,  # P is rounded to the input's dtype before P V
)
VARLEN_SPEC = OpSpec(
    name="attention_varlen",
    op=attention_varlen,
    reference=attention_varlen_reference,
    make_inputs=_make_varlen_inputs,
    differentiable=("q", "k", "v"),
    small_shapes=((8, 2, 16), (41, 2, 24)),
    bench_shapes=((32768, 32, 128),),
    variants=({}, {"window": 9}, {"causal": False}),
    num_bytes=lambda shape, itemsize: 4 * shape[0] * shape[1] * shape[2] * itemsize,
    num_bytes_backward=lambda shape, itemsize: 8 * shape[0] * shape[1] * shape[2] * itemsize,
    num_flops=lambda shape: 4 * shape[1] * shape[2] * sum(n * (n + 1) // 2 for n in _varlen_lengths(shape[0])),
    tolerance_ulps=4.0,
)
