"""Rows of more than 16384 elements for `layer_norm` and `rms_norm`: walked in pieces, because full they do not fit in registers.

Forward walks a row twice, the second time from cache: 4 bytes per bf16 element from memory, 8 with a residual. Mean and
variance come from one walk: every lane keeps the running mean and sum of squared deviations of its elements (Welford), and
the lanes are joined once, so large means cancel nothing and no piece waits at a barrier.

Backward takes two kernels and 10 bytes per bf16 element, where the kernels for shorter rows take 6: one finds a row's two
sums, one walks the rows of a stripe of columns, writes d_s and keeps the stripe's d_weight and d_bias in registers. Kept for
full rows, those sums alone would fill a multiprocessor's registers at 32768 elements. Results have the dtype of x; mean and rstd are fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ztk.kernels.launch.dependent import dependent_launch, wait_for_kernels
from ztk.kernels.launch.grids import cdiv, resident_programs
from ztk.kernels.launch.jit import jit
from ztk.kernels.launch.machine import machine
from ztk.kernels.launch.memory import empty_vector
from ztk.kernels.shared.math import cast
from ztk.kernels.shared.rows import column_sums, rows_of

WIDE = 16384  # elements of a row up to which the kernels that hold full rows are used
NUM_WARPS = 8
STRIPE_WARPS = 8


def _piece(x: Tensor) -> int:
    """Elements of a row in registers at a time: two 16-byte loads of 16 bits per thread."""
    return 16 * machine(x.device).warp_size * NUM_WARPS


def _stripe(x: Tensor) -> int:
    """Columns that a program of backward walks down."""
    return 8 * machine(x.device).warp_size * STRIPE_WARPS


@triton.jit
def _load_sum(x_ptr, residual_ptr, o_n, m_n, dtype: tl.constexpr):
    """s = x + residual in float32, rounded to the tensors' dtype as backward reads it"""
    b_s = tl.load(x_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        b_s = cast(b_s + tl.load(residual_ptr + o_n, mask=m_n, other=0.0).to(tl.float32), dtype).to(tl.float32)
    return b_s


@jit
def _wide_norm_fwd(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, summed_ptr, mean_ptr, rstd_ptr, N, eps,
    CENTRED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = (s - mean(s)) * rstd(s) * weight + bias for one row of s = x + residual; the mean is 0 unless CENTRED"""
    wait_for_kernels(PDL)
    i_m = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    b_mean = tl.zeros([BLOCK], dtype=tl.float32)
    b_squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        o_n = start + tl.arange(0, BLOCK)
        m_n = o_n < N
        b_s = _load_sum(x_ptr, residual_ptr, i_m * N + o_n, m_n, dtype)
        if residual_ptr is not None:
            tl.store(summed_ptr + i_m * N + o_n, cast(b_s, dtype), mask=m_n)
        if CENTRED:
            b_delta = tl.where(m_n, b_s - b_mean, 0.0)
            b_mean += b_delta / (start // BLOCK + 1)
            b_squares += b_delta * (b_s - b_mean)
        else:
            b_squares += b_s * b_s
    mean = 0.0
    if CENTRED:
        b_count = tl.cdiv(N - tl.arange(0, BLOCK), BLOCK).to(tl.float32)  # elements of each lane
        mean = tl.sum(b_mean * b_count, axis=0) / N
        b_squares += b_count * (b_mean - mean) * (b_mean - mean)
        tl.store(mean_ptr + i_m, mean)
    rstd = 1.0 / tl.sqrt(tl.sum(b_squares, axis=0) / N + eps)
    tl.store(rstd_ptr + i_m, rstd)
    for start in range(0, N, BLOCK):
        o_n = start + tl.arange(0, BLOCK)
        m_n = o_n < N
        b_out = (_load_sum(x_ptr, residual_ptr, i_m * N + o_n, m_n, dtype) - mean) * rstd
        b_out *= tl.load(weight_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            b_out += tl.load(bias_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
        tl.store(out_ptr + i_m * N + o_n, cast(b_out, dtype), mask=m_n)


@jit
def _wide_norm_sums(
    d_out_ptr, s_ptr, weight_ptr, mean_ptr, rstd_ptr, mean_g_ptr, mean_gh_ptr, N,
    CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """mean(g) and mean(g * h) of one row, g = d_out * weight, h = (s - mean) * rstd"""
    i_m = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstd_ptr + i_m)
    mean = 0.0
    if CENTRED:
        mean = tl.load(mean_ptr + i_m)
    b_sum_g = tl.zeros([BLOCK], dtype=tl.float32)
    b_sum_gh = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        o_n = start + tl.arange(0, BLOCK)
        m_n = o_n < N
        b_g = tl.load(d_out_ptr + i_m * N + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_g *= tl.load(weight_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_s = tl.load(s_ptr + i_m * N + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_sum_g += b_g
        b_sum_gh += b_g * ((b_s - mean) * rstd)
    if CENTRED:
        tl.store(mean_g_ptr + i_m, tl.sum(b_sum_g, axis=0) / N)
    tl.store(mean_gh_ptr + i_m, tl.sum(b_sum_gh, axis=0) / N)


@jit
def _wide_norm_bwd(
    d_out_ptr, d_summed_ptr, s_ptr, weight_ptr, mean_ptr, rstd_ptr, mean_g_ptr, mean_gh_ptr, d_s_ptr, d_weight_ptr,
    d_bias_ptr, M, N, CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """d_s = rstd * (g - mean(g) - h * mean(g * h)) + d_summed on a stripe of columns of rows i, i + programs, ..."""
    i_p = tl.program_id(1).to(tl.int64)
    o_n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < N
    b_weight = tl.load(weight_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_d_weight = tl.zeros([BLOCK], dtype=tl.float32)
    b_d_bias = tl.zeros([BLOCK], dtype=tl.float32)
    for i_m in range(i_p, M, tl.num_programs(1)):
        o_mn = tl.cast(i_m, tl.int64) * N + o_n
        b_d_out = tl.load(d_out_ptr + o_mn, mask=m_n, other=0.0).to(tl.float32)
        b_h = tl.load(s_ptr + o_mn, mask=m_n, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + i_m)
        if CENTRED:
            b_h -= tl.load(mean_ptr + i_m)
        b_h *= rstd
        b_d_weight += b_d_out * b_h
        b_d_s = b_d_out * b_weight - b_h * tl.load(mean_gh_ptr + i_m)
        if CENTRED:
            b_d_bias += b_d_out
            b_d_s -= tl.load(mean_g_ptr + i_m)
        b_d_s *= rstd
        if d_summed_ptr is not None:
            b_d_s += tl.load(d_summed_ptr + o_mn, mask=m_n, other=0.0).to(tl.float32)
        tl.store(d_s_ptr + o_mn, cast(b_d_s, d_s_ptr.dtype.element_ty), mask=m_n)
    tl.store(d_weight_ptr + i_p * N + o_n, b_d_weight, mask=m_n)
    if CENTRED:
        tl.store(d_bias_ptr + i_p * N + o_n, b_d_bias, mask=m_n)


def wide_forward(
    x: Tensor, *, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """(out [..., N], s [..., N], mean [M], rstd [M]) of x [..., N] with M rows; s is None without a residual, mean unless `centred`."""
    M, N = rows_of(x)
    out, summed = torch.empty_like(x), None if residual is None else torch.empty_like(x)
    rstd = empty_vector(M, dtype=torch.float32, like=x)
    mean = torch.empty_like(rstd) if centred else None
    if M:
        _wide_norm_fwd[(M,)](
            x, residual, weight, bias, out, summed, mean, rstd, N, eps, CENTRED=centred, BLOCK=_piece(x),
            num_warps=NUM_WARPS, enable_fp_fusion=True, **dependent_launch(machine(x.device)),
        )  # fmt: skip
    return out, summed, mean, rstd


def wide_backward(
    d_out: Tensor,
    *,
    d_summed: Tensor | None,
    s: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    bias_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(d_s [..., N], d_weight [N], d_bias [N] or None) in the dtypes of s, weight and bias; without `mean` nothing was centred."""
    (M, N), centred = rows_of(s), mean is not None
    mean_g, mean_gh = torch.empty(2, M, dtype=torch.float32, device=s.device)
    _wide_norm_sums[(M,)](
        d_out, s, weight, mean, rstd, mean_g if centred else None, mean_gh, N, CENTRED=centred, BLOCK=_piece(s),
        num_warps=NUM_WARPS, enable_fp_fusion=True,
    )  # fmt: skip
    stripe = _stripe(s)
    stripes = cdiv(N, stripe)
    resident = resident_programs(machine(s.device), num_warps=STRIPE_WARPS, registers=64)
    programs = max(1, min(M * stripes, resident) // stripes)
    d_s = torch.empty_like(s)
    partials = torch.empty(2 if centred else 1, programs, N, dtype=torch.float32, device=s.device)
    _wide_norm_bwd[(stripes, programs)](
        d_out, d_summed, s, weight, mean, rstd, mean_g if centred else None, mean_gh, d_s, partials[0],
        partials[1] if centred else None, M, N, CENTRED=centred, BLOCK=stripe, num_warps=STRIPE_WARPS, enable_fp_fusion=True,
    )  # fmt: skip
    d_weight = column_sums(partials[0], dtype=weight.dtype)
    return d_s, d_weight, column_sums(partials[1], dtype=bias_dtype) if centred else None
