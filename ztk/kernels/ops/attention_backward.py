"""Backward of `attention`: three kernels, no atomics, P recomputed from lse, or a library's (`ztk.kernels.shared.attention_choice`).

    delta = rowsum(out * d_out)
    dV = P^T d_out          dS = P * (d_out V^T - delta)
    dK = scale * dS^T Q     dQ = scale * dS K

One kernel holds a block of keys and walks the queries that attend to it, over all query heads of its key head in order, so that
grouped-query gradients need no reduction; one holds a block of queries and walks its visible keys. Both recompute P and dP: seven
products in all. Five would do in one kernel if dQ were added over blocks of keys, by atomics whose order changes the bits, or in an order
for which programs wait for each other.
"""

import torch
import triton.language as tl
from torch import Tensor

from ztk.kernels.launch.grids import cdiv, next_power_of_2
from ztk.kernels.launch.jit import Bound, bind, jit, kept
from ztk.kernels.launch.library import register
from ztk.kernels.launch.machine import Machine, machine
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

DELTA_ROWS = 32
_LOG2E = tl.constexpr(1.4426950408889634)


@jit
def _attention_delta(
    out_ptr, d_out_ptr, delta_ptr, num_tokens,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(out * d_out)"""
    o_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    i_h = tl.program_id(1).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    m_md = (o_m < num_tokens)[:, None] & (o_d < D)[None, :]
    o_md = o_m[:, None] * (H * D) + i_h * D + o_d[None, :]
    b_out = tl.load(out_ptr + o_md, mask=m_md, other=0.0).to(tl.float32)
    b_d_out = tl.load(d_out_ptr + o_md, mask=m_md, other=0.0).to(tl.float32)
    tl.store(delta_ptr + i_h * num_tokens + o_m, tl.sum(b_out * b_d_out, axis=1), mask=o_m < num_tokens)


@jit(do_not_specialize=["T", "window"])  # one token, or a window of one, is no other kernel
def _attention_bwd_keys(
    q_ptr, k_ptr, v_ptr, d_out_ptr, lse_ptr, delta_ptr, d_k_ptr, d_v_ptr, cu_seqlens_ptr, q_stride, k_stride, v_stride,
    num_tokens, T, window, scale,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """dV = P^T d_out and dK = scale * dS^T Q for one block of keys of one key head"""
    H_KV: tl.constexpr = H // GROUP
    i_bh, i_block, _ = program_place(T, BLOCK_N)
    i_kv = i_bh % H_KV
    start, length = sequence_bounds(cu_seqlens_ptr, i_bh // H_KV, T)
    i_key = (i_block * BLOCK_N).to(tl.int32)
    if i_key < length:
        o_n = i_key + tl.arange(0, BLOCK_N)
        o_d = tl.arange(0, BLOCK_D)
        m_nd = (o_n < length)[:, None] & (o_d < D)[None, :]
        b_k = tl.load(k_ptr + (start + o_n)[:, None] * k_stride + i_kv * D + o_d[None, :], mask=m_nd, other=0.0)
        b_v = tl.load(v_ptr + (start + o_n)[:, None] * v_stride + i_kv * D + o_d[None, :], mask=m_nd, other=0.0)
        b_d_k = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
        b_d_v = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)

        # Query blocks in [first_full, last_full) have no masked pairs; the diagonal cuts blocks before them, and the
        # window or the end of the sequence cuts blocks after them.
        first = 0
        first_full = 0
        last = length
        last_full = length // BLOCK_M * BLOCK_M
        if CAUSAL:
            first = i_key // BLOCK_M * BLOCK_M
            first_full = tl.cdiv(i_key + BLOCK_N - 1, BLOCK_M) * BLOCK_M
        if HAS_WINDOW:
            last = tl.minimum(length, i_key + BLOCK_N + window - 1)
            last_full = tl.minimum(last_full, (i_key + window) // BLOCK_M * BLOCK_M)

        # One loop over all query heads and blocks: a loop per kind of block, inside one over heads, keeps the invariants
        # of all of them in registers, 40 to 90 a thread.
        scale_log2 = scale * _LOG2E
        o_block = tl.arange(0, BLOCK_M)
        q_step = tl.cast(q_stride, tl.int32)  # inside a tile 32 bits are enough and take half the registers
        num_steps = tl.cdiv(last - first, BLOCK_M)
        for i in range(0, GROUP * num_steps):
            i_h = i_kv * GROUP + i // num_steps
            i_m = first + i % num_steps * BLOCK_M
            o_m = i_m + o_block
            m_m = o_m < length
            i_query = start + i_m
            m_md = m_m[:, None] & (o_d < D)[None, :]
            p_q = q_ptr + i_query * q_stride + i_h * D
            p_d_out = d_out_ptr + i_query * (H * D) + i_h * D
            b_q = tl.load(p_q + (o_block[:, None] * q_step + o_d[None, :]), mask=m_md, other=0.0)
            b_d_out = tl.load(p_d_out + (o_block[:, None] * (H * D) + o_d[None, :]), mask=m_md, other=0.0)
            b_lse = tl.load(lse_ptr + i_h * num_tokens + i_query + o_block, mask=m_m, other=0.0) * _LOG2E
            b_delta = tl.load(delta_ptr + i_h * num_tokens + i_query + o_block, mask=m_m, other=0.0)
            b_zero = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
            b_p = tl.exp2(dot(b_k, tl.trans(b_q), b_zero) * scale_log2 - b_lse[None, :])  # [BLOCK_N, BLOCK_M]
            if (i_m < first_full) | (i_m >= last_full):
                b_p = tl.where(visible(o_m[None, :], o_n[:, None], length, window, CAUSAL, HAS_WINDOW), b_p, 0.0)
            b_d_v = dot(cast(b_p, b_d_out.dtype), b_d_out, b_d_v)
            b_d_s = b_p * (dot(b_v, tl.trans(b_d_out), b_zero) - b_delta[None, :])
            b_d_k = dot(cast(b_d_s, b_q.dtype), b_q, b_d_k)
        o_nd = (start + o_n)[:, None] * (H_KV * D) + i_kv * D + o_d[None, :]
        tl.store(d_k_ptr + o_nd, cast(b_d_k * scale, d_k_ptr.dtype.element_ty), mask=m_nd)
        tl.store(d_v_ptr + o_nd, cast(b_d_v, d_v_ptr.dtype.element_ty), mask=m_nd)


@jit(do_not_specialize=["T", "window"])  # one token, or a window of one, is no other kernel
def _attention_bwd_queries(
    q_ptr, k_ptr, v_ptr, d_out_ptr, lse_ptr, delta_ptr, d_q_ptr, cu_seqlens_ptr, q_stride, k_stride, v_stride,
    num_tokens, T, window, scale,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """dQ = scale * dS K for one block of queries of one head"""
    i_bh, i_block, num_blocks = program_place(T, BLOCK_M)
    i_h = i_bh % H
    start, length = sequence_bounds(cu_seqlens_ptr, i_bh // H, T)
    if CAUSAL:
        i_block = num_blocks - 1 - i_block
    i_row = (i_block * BLOCK_M).to(tl.int32)
    if i_row < length:
        o_m = i_row + tl.arange(0, BLOCK_M)
        o_d = tl.arange(0, BLOCK_D)
        m_m = o_m < length
        m_md = m_m[:, None] & (o_d < D)[None, :]
        o_out = (start + o_m)[:, None] * (H * D) + i_h * D + o_d[None, :]
        b_q = tl.load(q_ptr + (start + o_m)[:, None] * q_stride + i_h * D + o_d[None, :], mask=m_md, other=0.0)
        b_d_out = tl.load(d_out_ptr + o_out, mask=m_md, other=0.0)
        b_lse = tl.load(lse_ptr + i_h * num_tokens + start + o_m, mask=m_m, other=0.0) * _LOG2E
        b_delta = tl.load(delta_ptr + i_h * num_tokens + start + o_m, mask=m_m, other=0.0)
        b_d_q = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        scale_log2 = scale * _LOG2E
        i_kv = i_h // GROUP
        first, first_full, last_full, last = key_range(
            i_row, length, window, CAUSAL, HAS_WINDOW, BLOCK_M, BLOCK_N
        )  # fmt: skip
        o_block = tl.arange(0, BLOCK_N)
        k_step = tl.cast(k_stride, tl.int32)
        v_step = tl.cast(v_stride, tl.int32)
        for i_n in range(first, last, BLOCK_N):
            o_n = i_n + o_block
            i_key = start + i_n
            m_nd = (o_n < length)[:, None] & (o_d < D)[None, :]
            p_k = k_ptr + i_key * k_stride + i_kv * D
            p_v = v_ptr + i_key * v_stride + i_kv * D
            b_k = tl.load(p_k + (o_block[:, None] * k_step + o_d[None, :]), mask=m_nd, other=0.0)
            b_v = tl.load(p_v + (o_block[:, None] * v_step + o_d[None, :]), mask=m_nd, other=0.0)
            b_zero = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
            b_p = tl.exp2(dot(b_q, tl.trans(b_k), b_zero) * scale_log2 - b_lse[:, None])  # [BLOCK_M, BLOCK_N]
            if (i_n < first_full) | (i_n >= last_full):
                b_p = tl.where(visible(o_m[:, None], o_n[None, :], length, window, CAUSAL, HAS_WINDOW), b_p, 0.0)
            b_d_s = b_p * (dot(b_d_out, tl.trans(b_v), b_zero) - b_delta[:, None])
            b_d_q = dot(cast(b_d_s, b_k.dtype), b_k, b_d_q)
        tl.store(d_q_ptr + o_out, cast(b_d_q * scale, d_q_ptr.dtype.element_ty), mask=m_md)


@kept
def _kernels_for(
    target: Machine, shape: torch.Size, H_kv: int, itemsize: int, q_stride: int, k_stride: int, v_stride: int,
    num_sequences: int, T: int, causal: bool, window: int, scale: float,
) -> tuple[Bound, Bound, Bound]:  # fmt: skip
    """The kernels for delta, for the gradients of keys and values, and for the gradient of the queries, which have the shape `shape`."""
    tokens, H, D = shape
    sizes = {"H": H, "D": D, "BLOCK_D": max(16, next_power_of_2(D)), "enable_fp_fusion": True}
    delta = bind(_attention_delta, tokens, grid=(cdiv(tokens, DELTA_ROWS), H), **sizes, BLOCK_M=DELTA_ROWS, num_warps=4)
    options = sizes | {"GROUP": H // H_kv, "CAUSAL": causal, "HAS_WINDOW": window > 0}
    numbers = (q_stride, k_stride, v_stride, tokens, T, window, scale)
    chosen = {"head_dim": D, "itemsize": itemsize, "architecture": target.architecture}
    tiles = tiles_for(Part.keys, **chosen)
    keys = bind(
        _attention_bwd_keys, *numbers, grid=(cdiv(T, tiles.held) * num_sequences * H_kv,), **options, BLOCK_N=tiles.held,
        BLOCK_M=tiles.step, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    tiles = tiles_for(Part.queries, **chosen)
    queries = bind(
        _attention_bwd_queries, *numbers, grid=(cdiv(T, tiles.held) * num_sequences * H,), **options, BLOCK_M=tiles.held,
        BLOCK_N=tiles.step, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return delta, keys, queries


def _launch_bwd(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor | None,
    T: int, causal: bool, window: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    given = (d_out, q, k, v, out, lse, cu_seqlens, T, causal, window, scale)
    if attention_choice.is_open(q):
        chosen = attention_choice.choose(
            "backward", given, q=q, k=k, cu_seqlens=cu_seqlens, T=T, causal=causal, window=window, own=_launch_own_bwd, others=_LIBRARIES
        )  # fmt: skip
        if chosen != attention_choice.OWN:
            return _LIBRARIES[chosen](*given)
    return _launch_own_bwd(*given)


def _launch_own_bwd(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor | None,
    T: int, causal: bool, window: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    tokens = q.shape[0]
    d_q, d_k, d_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    if not tokens:
        return d_q, d_k, d_v
    num_sequences = tokens // T if cu_seqlens is None else cu_seqlens.numel() - 1
    of_delta, of_keys, of_queries = _kernels_for(
        machine(q.device), q.shape, k.shape[1], q.element_size(), q.stride(0), k.stride(0), v.stride(0), num_sequences, T,
        causal, window, scale,
    )  # fmt: skip
    delta = torch.empty_like(lse)
    of_delta.launch(out, d_out, delta)
    of_keys.launch(q, k, v, d_out, lse, delta, d_k, d_v, cu_seqlens)
    of_queries.launch(q, k, v, d_out, lse, delta, d_q, cu_seqlens)
    return d_q, d_k, d_v


def _flash_bwd(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor | None,
    T: int, causal: bool, window: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    d_q, d_k, d_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    sizes = attention_choice.flash_sizes(q, cu_seqlens=cu_seqlens, T=T, causal=causal, window=window)
    attention_choice.flash()._flash_attn_backward(
        d_out,
        q,
        k,
        v,
        out,
        lse,
        **sizes,
        dq=d_q,
        dk=d_k,
        dv=d_v,
        softmax_scale=scale,
        is_causal=causal,
        deterministic=True,
    )
    return d_q, d_k, d_v


_LIBRARIES = {attention_choice.FLASH: _flash_bwd}


def _cpu_bwd(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor | None,
    T: int, causal: bool, window: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (tokens, H, _), H_kv = q.shape, k.shape[1]
    grouped = H_kv != H
    d_q, d_k, d_v = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
    for first, count, length in cpu_sequences(tokens, cu_seqlens=cu_seqlens, T=T) if tokens else ():
        cut = {"first": first, "count": count, "T": length}
        d_out_b, q_b, k_b, v_b, out_b = (batch_view(x, **cut) for x in (d_out, q, k, v, out))
        mask = cpu_mask(length, window=window, dtype=q.dtype)
        lse_b = lse[:, first : first + count * length].unflatten(1, (count, length)).transpose(0, 1)
        wide = (x.repeat_interleave(H // H_kv, dim=1) if grouped else x for x in (k_b, v_b))
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_out_b, q_b, *wide, out_b, lse_b, 0.0, causal and mask is None, attn_mask=mask, scale=scale
        )
        for d_x, part in zip((d_q, d_k, d_v), parts, strict=True):
            if part.shape[1] != d_x.shape[1]:  # the query heads of one key head, summed in float32
                part = part.unflatten(1, (H_kv, H // H_kv)).sum(dim=2, dtype=torch.float32)
            batch_view(d_x, **cut).copy_(part)
    return d_q, d_k, d_v


backward = register(
    "attention_backward(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? cu_seqlens, int T, "
    "bool causal, int window, float scale) -> (Tensor, Tensor, Tensor)",
    triton=_launch_bwd,
    cpu=_cpu_bwd,
    fake=lambda d_out, q, k, v, out, lse, cu_seqlens, T, causal, window, scale: tuple(
        x.new_empty(x.shape) for x in (q, k, v)
    ),
)
