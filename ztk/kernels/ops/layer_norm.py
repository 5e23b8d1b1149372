"""LayerNorm over the last dimension, with an optional residual added first.

    s = x + residual,  h = (s - mean(s)) * rstd(s),  out = h * weight + bias

Forward reads x (and residual) and writes out (and s) once: 4 bytes per bf16 element, 8 with a residual. A row stays in
registers between its mean, its variance (of the centred values, so large means cancel nothing) and its output.

    g   = d_out * weight
    d_s = rstd * (g - mean(g) - h * mean(g * h)) + d_s_out      (d_s_out: gradient of the returned s)
    d_weight = sum over rows of d_out * h,   d_bias = sum over rows of d_out

Backward reads d_out and s and writes d_s: 6 bytes per bf16 element. A fixed grid of programs walks the rows, loads the
next ones before it reduces the present ones, and keeps d_weight and d_bias in registers; the partial sums are added by
a second kernel in program order. No atomics: the same input gives the same bits. Rows above 8192 are read twice, the
second time from cache, instead of being held across the reductions; rows above 16384 go through `shared.wide_norm`.

Ba et al., Layer normalization, https://arxiv.org/abs/1607.06450
"""

import math
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from ztk.kernels.launch.dependent import dependent_launch, wait_for_kernels
from ztk.kernels.launch.direct import is_plain
from ztk.kernels.launch.functions import OnceFunction
from ztk.kernels.launch.grids import cdiv, next_power_of_2, register_limit, resident_programs
from ztk.kernels.launch.jit import Bound, bind, jit, kept
from ztk.kernels.launch.library import needs_reference, register
from ztk.kernels.launch.machine import Machine, machine
from ztk.kernels.launch.memory import Memory, empty_matrix, maker, memory_of
from ztk.kernels.shared.math import cast
from ztk.kernels.shared.rows import rows_of
from ztk.kernels.shared.spec import OpSpec, compute_dtype
from ztk.kernels.shared.wide_norm import WIDE, wide_backward, wide_forward

REDUCE_ROWS, REDUCE_COLUMNS = 32, 128


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """Rows per program, the padded row, the warps that hold it, and whether backward loads rows ahead or twice."""

    block_m: int
    block_n: int
    num_warps: int
    prefetch: bool  # off where two more rows would not fit in registers

    @staticmethod
    def for_features(N: int, *, warp_size: int) -> "LaunchConfig":
        """Eight elements per thread or more (16 bytes an access); short rows share a program, long ones get warps."""
        block_n = next_power_of_2(N)
        threads = next(t for limit, t in ((1024, 128), (2048, 256), (8192, 512), (WIDE, 1024)) if block_n <= limit)
        num_warps = max(4, threads // warp_size)
        block_m = max(1, 8 * num_warps * warp_size // block_n)
        return LaunchConfig(block_m=block_m, block_n=block_n, num_warps=num_warps, prefetch=block_n <= 4096)


@jit(do_not_specialize=["M"])
def _layer_norm_fwd(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, summed_ptr, mean_ptr, rstd_ptr, M, N, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """s = x + residual; out = (s - mean) * rstd * weight + bias"""
    wait_for_kernels(PDL)
    i_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    m_m = i_m < M
    m_n = (o_n < N)[None, :]
    m_mn = m_m[:, None] & m_n
    o_mn = i_m[:, None] * N + o_n[None, :]  # [BLOCK_M, BLOCK_N]
    b_s = tl.load(x_ptr + o_mn, mask=m_mn, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        b_s += tl.load(residual_ptr + o_mn, mask=m_mn, other=0.0).to(tl.float32)
        b_stored = cast(b_s, summed_ptr.dtype.element_ty)
        tl.store(summed_ptr + o_mn, b_stored, mask=m_mn)
        b_s = b_stored.to(tl.float32)  # backward reads the rounded sum, so forward normalises the same values
    b_mean = tl.sum(b_s, axis=1) / N
    b_centred = tl.where(m_n, b_s - b_mean[:, None], 0.0)
    b_rstd = 1.0 / tl.sqrt(tl.sum(b_centred * b_centred, axis=1) / N + eps)
    b_out = b_centred * b_rstd[:, None]
    b_out *= tl.load(weight_ptr + o_n, mask=o_n < N, other=0.0).to(tl.float32)[None, :]
    if bias_ptr is not None:
        b_out += tl.load(bias_ptr + o_n, mask=o_n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + o_mn, cast(b_out, out_ptr.dtype.element_ty), mask=m_mn)
    tl.store(mean_ptr + i_m, b_mean, mask=m_m)
    tl.store(rstd_ptr + i_m, b_rstd, mask=m_m)


@jit
def _layer_norm_bwd(
    d_out_ptr, d_summed_ptr, s_ptr, weight_ptr, mean_ptr, rstd_ptr, d_s_ptr, d_weight_ptr, d_bias_ptr, M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """d_s = rstd * (g - mean(g) - h * mean(g * h)) + d_summed; one partial row of d_weight and d_bias per program"""
    i_p = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, BLOCK_N)
    m_n = (o_n < N)[None, :]
    if PREFETCH:
        b_weight = tl.load(weight_ptr + o_n, mask=o_n < N, other=0.0).to(tl.float32)[None, :]
    b_d_weight = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    b_d_bias = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)

    step = tl.num_programs(0) * BLOCK_M
    i_m = i_p * BLOCK_M + tl.arange(0, BLOCK_M)
    o_mn = i_m[:, None] * N + o_n[None, :]
    m_mn = (i_m < M)[:, None] & m_n
    if PREFETCH:
        b_s_next = tl.load(s_ptr + o_mn, mask=m_mn, other=0.0)
        b_d_out_next = tl.load(d_out_ptr + o_mn, mask=m_mn, other=0.0)
    for _ in range(0, tl.cdiv(M - i_p * BLOCK_M, step)):
        if PREFETCH:
            b_s = b_s_next.to(tl.float32)
            b_d_out = b_d_out_next.to(tl.float32)
        else:
            b_s = tl.load(s_ptr + o_mn, mask=m_mn, other=0.0, eviction_policy="evict_last").to(tl.float32)
            b_d_out = tl.load(d_out_ptr + o_mn, mask=m_mn, other=0.0, eviction_policy="evict_last").to(tl.float32)
            b_weight = tl.load(weight_ptr + o_n, mask=o_n < N, other=0.0, eviction_policy="evict_last")
            b_weight = b_weight.to(tl.float32)[None, :]
        b_mean = tl.load(mean_ptr + i_m, mask=i_m < M, other=0.0)[:, None]
        b_rstd = tl.load(rstd_ptr + i_m, mask=i_m < M, other=0.0)[:, None]
        i_next = i_m + step
        o_next = i_next[:, None] * N + o_n[None, :]
        m_next = (i_next < M)[:, None] & m_n
        if PREFETCH:
            b_s_next = tl.load(s_ptr + o_next, mask=m_next, other=0.0)
            b_d_out_next = tl.load(d_out_ptr + o_next, mask=m_next, other=0.0)

        b_h = tl.where(m_mn, (b_s - b_mean) * b_rstd, 0.0)
        b_g = b_d_out * b_weight
        b_mean_g = tl.sum(b_g, axis=1) / N
        b_mean_gh = tl.sum(b_g * b_h, axis=1) / N
        if not PREFETCH:  # the row again, from cache: held across the reductions it would spill
            b_s = tl.load(s_ptr + o_mn, mask=m_mn, other=0.0, eviction_policy="evict_first").to(tl.float32)
            b_d_out = tl.load(d_out_ptr + o_mn, mask=m_mn, other=0.0, eviction_policy="evict_first").to(tl.float32)
            b_h = tl.where(m_mn, (b_s - b_mean) * b_rstd, 0.0)
            b_g = b_d_out * tl.load(weight_ptr + o_n, mask=o_n < N, other=0.0).to(tl.float32)[None, :]
        b_d_weight += b_d_out * b_h
        b_d_bias += b_d_out
        b_d_s = b_rstd * (b_g - b_mean_g[:, None] - b_h * b_mean_gh[:, None])
        if d_summed_ptr is not None:
            b_d_s += tl.load(d_summed_ptr + o_mn, mask=m_mn, other=0.0).to(tl.float32)
        tl.store(d_s_ptr + o_mn, cast(b_d_s, d_s_ptr.dtype.element_ty), mask=m_mn)
        i_m, o_mn, m_mn = i_next, o_next, m_next
    tl.store(d_weight_ptr + i_p * N + o_n, tl.sum(b_d_weight, axis=0), mask=o_n < N)
    tl.store(d_bias_ptr + i_p * N + o_n, tl.sum(b_d_bias, axis=0), mask=o_n < N)


@jit
def _reduce_partials(
    d_weight_ptr, d_bias_ptr, weight_out_ptr, bias_out_ptr, num_partials, N,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """sum over partial rows, in order, of d_weight and d_bias"""
    o_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    b_weight = tl.zeros([BLOCK_P, BLOCK_N], dtype=tl.float32)
    b_bias = tl.zeros([BLOCK_P, BLOCK_N], dtype=tl.float32)
    for i_start in range(0, num_partials, BLOCK_P):
        o_p = i_start + tl.arange(0, BLOCK_P)
        m_pn = (o_p < num_partials)[:, None] & (o_n < N)[None, :]
        o_pn = o_p[:, None] * N + o_n[None, :]
        b_weight += tl.load(d_weight_ptr + o_pn, mask=m_pn, other=0.0)
        b_bias += tl.load(d_bias_ptr + o_pn, mask=m_pn, other=0.0)
    tl.store(weight_out_ptr + o_n, cast(tl.sum(b_weight, axis=0), weight_out_ptr.dtype.element_ty), mask=o_n < N)
    if bias_out_ptr is not None:
        tl.store(bias_out_ptr + o_n, cast(tl.sum(b_bias, axis=0), bias_out_ptr.dtype.element_ty), mask=o_n < N)


@kept
def _forward_for(target: Machine, shape: torch.Size, dtype: torch.dtype, eps: float) -> tuple[Bound, Memory, Memory]:
    """With the memory of out and of a statistic. shape, dtype: x's."""
    M, N = math.prod(shape[:-1]), shape[-1]
    config = LaunchConfig.for_features(N, warp_size=target.warp_size)
    bound = bind(
        _layer_norm_fwd, M, N, eps, grid=(cdiv(M, config.block_m),), BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        num_warps=config.num_warps, enable_fp_fusion=True, **dependent_launch(target),
    )  # fmt: skip
    return bound, memory_of(*shape, dtype=dtype), memory_of(M, dtype=torch.float32)


def _launch_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, eps: float) -> list[Tensor]:
    shape = x.shape
    if shape[-1] > WIDE:
        out, summed, mean, rstd = wide_forward(x, residual=residual, weight=weight, bias=bias, eps=eps, centred=True)
    else:
        forward, like_x, per_row = _forward_for(machine(x.device), shape, x.dtype, eps)
        make = maker(x)
        out, mean, rstd = make(*like_x), make(*per_row), make(*per_row)
        summed = None if residual is None else make(*like_x)
        if x.numel():
            forward.launch(x, residual, weight, bias, out, summed, mean, rstd)
    return [out, mean, rstd] if residual is None else [out, mean, rstd, summed]


@kept
def _backward_for(target: Machine, M: int, N: int) -> tuple[Bound, Bound]:
    """The kernel over rows, and the kernel that adds up its programs' sums."""
    config = LaunchConfig.for_features(N, warp_size=target.warp_size)
    registers = 64 if config.prefetch or config.block_n > 8192 else 80
    programs = min(cdiv(M, config.block_m), resident_programs(target, num_warps=config.num_warps, registers=registers))
    over_rows = bind(
        _layer_norm_bwd, M, N, grid=(programs,), BLOCK_M=config.block_m, BLOCK_N=config.block_n, PREFETCH=config.prefetch,
        num_warps=config.num_warps, enable_fp_fusion=True,
        **register_limit(registers, num_warps=config.num_warps, target=target),
    )  # fmt: skip
    reduction = bind(
        _reduce_partials, programs, N, grid=(cdiv(N, REDUCE_COLUMNS),), BLOCK_P=REDUCE_ROWS, BLOCK_N=REDUCE_COLUMNS, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
    return over_rows, reduction


def _launch_bwd(
    d_out: Tensor, d_summed: Tensor | None, s: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    M, N = rows_of(s)
    d_s, d_weight = torch.empty_like(s), torch.empty_like(weight)
    d_bias = torch.empty_like(weight if bias is None else bias)
    if not M:
        return d_s, d_weight.zero_(), d_bias.zero_()
    if N > WIDE:
        return wide_backward(
            d_out, d_summed=d_summed, s=s, weight=weight, mean=mean, rstd=rstd, bias_dtype=d_bias.dtype
        )
    backward, reduction = _backward_for(machine(s.device), M, N)
    (programs,) = backward.grid
    partials = [empty_matrix(programs, columns=N, dtype=torch.float32, like=s) for _ in range(2)]
    backward.launch(d_out, d_summed, s, weight, mean, rstd, d_s, *partials)
    reduction.launch(*partials, d_weight, d_bias)
    return d_s, d_weight, d_bias


def _cpu_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, eps: float) -> list[Tensor]:
    s = x if residual is None else x + residual
    out, mean, rstd = torch.native_layer_norm(s, s.shape[-1:], weight, bias, eps)
    statistics = [mean.float().view(-1), rstd.float().view(-1)]
    return [out, *statistics] if residual is None else [out, *statistics, s]


def _cpu_bwd(
    d_out: Tensor, d_summed: Tensor | None, s: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    shift = torch.zeros_like(weight) if bias is None else bias
    stats = (t.to(s.dtype).view(*s.shape[:-1], 1) for t in (mean, rstd))
    d_s, d_weight, d_bias = torch.ops.aten.native_layer_norm_backward(
        d_out, s, s.shape[-1:], *stats, weight, shift, [True, True, True]
    )
    return d_s if d_summed is None else d_s.add_(d_summed), d_weight, d_bias


def _fake_fwd(x, weight, bias, residual, eps):
    statistics = x.new_empty(rows_of(x)[0], dtype=torch.float32)
    summed = [torch.empty_like(x) for _ in range(residual is not None)]
    return [torch.empty_like(x), statistics, torch.empty_like(statistics), *summed]


_forward = register(
    "layer_norm(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, float eps)"
    " -> Tensor[]",  # the sum last, if there is one
    triton=_launch_fwd,
    cpu=_cpu_fwd,
    fake=_fake_fwd,
)
_backward = register(
    "layer_norm_backward(Tensor d_out, Tensor? d_summed, Tensor s, Tensor weight, Tensor? bias, Tensor mean, "
    "Tensor rstd) -> (Tensor, Tensor, Tensor)",
    triton=_launch_bwd,
    cpu=_cpu_bwd,
    fake=lambda d_out, d_summed, s, weight, bias, mean, rstd: (
        torch.empty_like(s),
        torch.empty_like(weight),
        torch.empty_like(weight if bias is None else bias),
    ),  # fmt: skip
)


class _LayerNorm(OnceFunction):
    @staticmethod
    def forward(ctx, x, weight, bias, residual, eps):
        out, mean, rstd, *summed = _forward(x, weight, bias, residual, eps)
        ctx.save_for_backward(*(summed or [x]), weight, bias, mean, rstd)
        ctx.has_residual = residual is not None
        return (out, *summed) if summed else out

    @staticmethod
    def backward(ctx, d_out, d_summed=None):
        s, weight, bias, mean, rstd = ctx.saved_tensors
        d_summed = None if d_summed is None else d_summed.contiguous()
        d_s, d_weight, d_bias = _backward(d_out.contiguous(), d_summed, s, weight, bias, mean, rstd)
        return d_s, d_weight, None if bias is None else d_bias, d_s if ctx.has_residual else None, None


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float = 1e-5, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """LayerNorm of `x` [..., N] with `weight` [N] and optional `bias` [N], all float32, float16 or bfloat16.

    With `residual`, of x's shape and dtype, normalises s = x + residual and returns (out, s), else out [..., N].
    Statistics are float32. Gradients for x, weight, bias and residual.
    Raises ValueError for other shapes, and a residual of another dtype.
    """
    N = x.shape[-1]
    if weight.shape != (N,) or (bias is not None and bias.shape != (N,)):
        raise ValueError(f"layer_norm: weight {tuple(weight.shape)} and bias must be [{N}], the last dimension of x")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"layer_norm: residual {tuple(residual.shape)} {residual.dtype} must match x {tuple(x.shape)} {x.dtype}"
        )
    if needs_reference():
        return layer_norm_reference(x, weight, bias, eps=eps, residual=residual)
    x, residual = x.contiguous(), None if residual is None else residual.contiguous()
    if is_plain():
        out, _, _, *summed = _forward(x, weight, bias, residual, eps)
        return (out, *summed) if summed else out
    return _LayerNorm.apply(x, weight, bias, residual, eps)


def layer_norm_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float = 1e-5, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """(s - mean) / sqrt(variance + eps) * weight + bias in float32, rounded once (s is rounded before it is used)."""
    dtype = compute_dtype(x)
    s = x if residual is None else (x.to(dtype) + residual.to(dtype)).to(x.dtype)
    s_c = s.to(dtype)
    centred = s_c - s_c.mean(dim=-1, keepdim=True)
    out = centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps) * weight.to(dtype)
    out = (out if bias is None else out + bias.to(dtype)).to(x.dtype)
    return out if residual is None else (out, s)


def _eager(x, weight, bias=None, *, eps=1e-5, residual=None):
    s = x if residual is None else x + residual
    out = torch.nn.functional.layer_norm(s, s.shape[-1:], weight, bias, eps)
    return out if residual is None else (out, s)


def _make_inputs(shape, *, dtype, device, residual=False, bias=True, shift=0.0) -> dict[str, object]:
    def normal(*size):
        return torch.randn(*size, dtype=dtype, device=device)

    return {
        "x": normal(*shape) + shift,
        "weight": 1.0 + 0.1 * normal(shape[-1]),
        "bias": normal(shape[-1]) if bias else None,
        "residual": normal(*shape) if residual else None,
    }


SPEC = OpSpec(
    name="layer_norm",
    op=layer_norm,
    reference=layer_norm_reference,
    eager=_eager,
    make_inputs=_make_inputs,
    differentiable=("x", "weight", "bias", "residual"),
    small_shapes=((1, 8), (5, 41), (2, 3, 130), (7, 1025), (0, 8)),
    bench_shapes=((8192, 4096), (4096, 16384)),
    variants=({}, {"residual": True}, {"bias": False}),
    num_bytes=lambda shape, itemsize: 2 * shape[0] * shape[1] * itemsize,
    num_bytes_backward=lambda shape, itemsize: 3 * shape[0] * shape[1] * itemsize,
    num_flops=lambda shape: 8 * shape[0] * shape[1],
)
