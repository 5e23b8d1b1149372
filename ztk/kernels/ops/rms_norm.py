"""RMS norm over the last dimension, with an optional residual added first.

    x    = x + residual                        (returned too, when there is a residual)
    rstd = 1 / sqrt(mean(x^2) + eps)
    y    = x * rstd * weight
    d_x      = rstd * (d_y * weight - x * rstd^2 * mean(d_y * weight * x))   (+ the gradient of the returned sum)
    d_weight = sum over rows of d_y * x * rstd

Forward reads and writes N elements once (with a residual reads 2N, writes 2N); backward reads 2N and writes N. rstd is kept
in float32, one number per row. d_weight is summed in registers over the rows of each program, in a fixed order, and the
programs' partial sums are added by a second kernel: no atomics. Rows above 16384 go through `shared.wide_norm`.

Zhang and Sennrich, https://arxiv.org/abs/1910.07467
"""

import math

import torch
import triton.language as tl
from torch import Tensor

from ztk.kernels.launch.dependent import dependent_launch, wait_for_kernels
from ztk.kernels.launch.direct import is_plain
from ztk.kernels.launch.functions import OnceFunction
from ztk.kernels.launch.grids import cdiv, register_limit, resident_programs
from ztk.kernels.launch.jit import Bound, bind, jit, kept
from ztk.kernels.launch.library import needs_reference, register
from ztk.kernels.launch.machine import Machine, machine
from ztk.kernels.launch.memory import Memory, empty_matrix, maker, memory_of
from ztk.kernels.shared.cpu import rows_per_piece, scaled_float32, scratch
from ztk.kernels.shared.math import cast
from ztk.kernels.shared.rows import column_sums, row_launch, rows_of
from ztk.kernels.shared.spec import OpSpec, compute_dtype
from ztk.kernels.shared.wide_norm import WIDE, wide_backward, wide_forward

LONG_ROW = 8192  # without a mask per row and without d_sum, backward takes 64 registers
BACKWARD_THREADS = 1024  # sixteen elements of a 16384-wide row per thread: with 32, the sums of d_weight spill


@jit(do_not_specialize=["M"])
def _rms_norm_fwd(
    x_ptr, residual_ptr, weight_ptr, sum_ptr, y_ptr, rstd_ptr, M, N, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = x * rstd * weight for BLOCK_M rows"""
    wait_for_kernels(PDL)
    i_m = tl.program_id(0).to(tl.int64)
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    m_m = o_m < M
    m_n = o_n < N
    m = m_m[:, None] & m_n[None, :]
    p = o_m[:, None] * N + o_n[None, :]
    b_x = tl.load(x_ptr + p, mask=m, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_N]
    if residual_ptr is not None:
        b_sum = cast(b_x + tl.load(residual_ptr + p, mask=m, other=0.0).to(tl.float32), sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + p, b_sum, mask=m)
        b_x = b_sum.to(tl.float32)  # backward reads the rounded sum, so forward normalises that one
    b_rstd = 1.0 / tl.sqrt(tl.sum(b_x * b_x, axis=1) / N + eps)  # [BLOCK_M]
    b_w = tl.load(weight_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_y = b_x * b_rstd[:, None] * b_w[None, :]
    tl.store(y_ptr + p, cast(b_y, y_ptr.dtype.element_ty), mask=m)
    tl.store(rstd_ptr + o_m, b_rstd, mask=m_m)


@jit
def _rms_norm_bwd(
    d_y_ptr, d_sum_ptr, x_ptr, weight_ptr, rstd_ptr, d_x_ptr, partial_ptr, M, N, num_tiles,
    HAS_D_SUM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """d_x of the row tiles i, i + programs, ..., and their share of d_weight"""
    i_program = tl.program_id(0).to(tl.int64)
    num_programs = tl.num_programs(0).to(tl.int64)
    o_m = tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    m_n = o_n < N
    o_tile = o_m[:, None] * N + o_n[None, :]  # 32 bits: a tile's offsets are the same in every round
    o_w = o_m[:, None] * 0 + o_n[None, :]  # a copy of the weight per row, so that it needs no other layout
    m_w = (o_m >= 0)[:, None] & m_n[None, :]
    b_d_w = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)  # summed over rows once, after the loop
    first = i_program * BLOCK_M
    for _ in range(i_program, num_tiles, num_programs):
        m_m = o_m < M - first
        m = m_m[:, None] & m_n[None, :]
        start = first * N
        b_x = tl.load(x_ptr + start + o_tile, mask=m, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_N]
        b_d_y = tl.load(d_y_ptr + start + o_tile, mask=m, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_N]
        b_rstd = tl.load(rstd_ptr + first + o_m, mask=m_m, other=0.0)  # [BLOCK_M]
        b_w = tl.load(weight_ptr + o_w, mask=m_w, other=0.0).to(tl.float32)  # again each time: it would cost registers
        if HAS_D_SUM:  # before the reduction, whose barrier would hold it back
            b_d_sum = tl.load(d_sum_ptr + start + o_tile, mask=m, other=0.0)
        b_mean = tl.sum(b_d_y * b_w * b_x, axis=1) * b_rstd / N
        # The rows again, from the first-level cache: held across the reduction they would cost half of the programs
        b_x = tl.load(x_ptr + start + o_tile, mask=m, other=0.0, cache_modifier=".ca").to(tl.float32)
        b_d_y = tl.load(d_y_ptr + start + o_tile, mask=m, other=0.0, cache_modifier=".ca").to(tl.float32)
        b_w = tl.load(weight_ptr + o_w, mask=m_w, other=0.0, cache_modifier=".ca").to(tl.float32)
        b_hat = b_x * b_rstd[:, None]
        b_d_w += b_d_y * b_hat
        b_d_hat = b_d_y * b_w
        b_d_x = (b_d_hat - b_hat * b_mean[:, None]) * b_rstd[:, None]
        if HAS_D_SUM:
            b_d_x += b_d_sum.to(tl.float32)
        tl.store(d_x_ptr + start + o_tile, cast(b_d_x, d_x_ptr.dtype.element_ty), mask=m)
        first += num_programs * BLOCK_M
    tl.store(partial_ptr + i_program * N + o_n, tl.sum(b_d_w, axis=0), mask=m_n)


@kept
def _forward_for(target: Machine, shape: torch.Size, dtype: torch.dtype, eps: float) -> tuple[Bound, Memory, Memory]:
    """With the memory of y and of rstd. shape, dtype: x's."""
    M, N = math.prod(shape[:-1]), shape[-1]
    launch = row_launch(N, warp_size=target.warp_size)
    bound = bind(
        _rms_norm_fwd, M, N, eps, grid=(cdiv(M, launch.block_m),), BLOCK_M=launch.block_m, BLOCK_N=launch.block_n,
        num_warps=launch.num_warps, enable_fp_fusion=True, **dependent_launch(target),
    )  # fmt: skip
    return bound, memory_of(*shape, dtype=dtype), memory_of(M, dtype=torch.float32)


def _launch_fwd(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> list[Tensor]:
    shape = x.shape
    if shape[-1] > WIDE:
        y, total, _, rstd = wide_forward(x, residual=residual, weight=weight, bias=None, eps=eps, centred=False)
    else:
        forward, like_x, per_row = _forward_for(machine(x.device), shape, x.dtype, eps)
        make = maker(x)
        y, rstd = make(*like_x), make(*per_row)
        total = None if residual is None else make(*like_x)
        if x.numel():
            forward.launch(x, residual, weight, total, y, rstd)
    return [y, rstd] if residual is None else [y, rstd, total]


@kept
def _backward_for(target: Machine, M: int, N: int, has_d_sum: bool) -> Bound:
    """With a grid of as many programs as there are tiles, or as stay on the machine."""
    launch = row_launch(N, warp_size=target.warp_size, max_threads=BACKWARD_THREADS)
    registers = 64 if launch.block_n >= LONG_ROW and not has_d_sum else 80
    # With d_sum the kernel takes 72 at most by itself; under a limit of 80 the assembler of Triton 3.9 takes them all and spills.
    limit = {} if has_d_sum else register_limit(registers, num_warps=launch.num_warps, target=target)
    num_tiles = cdiv(M, launch.block_m)
    programs = min(num_tiles, resident_programs(target, num_warps=launch.num_warps, registers=registers))
    return bind(
        _rms_norm_bwd, M, N, num_tiles, grid=(programs,), HAS_D_SUM=has_d_sum, BLOCK_M=launch.block_m, BLOCK_N=launch.block_n,
        num_warps=launch.num_warps, enable_fp_fusion=True, **limit,
    )  # fmt: skip


def _launch_bwd(d_y: Tensor, d_sum: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    M, N = rows_of(x)
    d_x = torch.empty_like(x)
    if M == 0:
        return d_x, torch.zeros_like(weight)
    if N > WIDE:
        return wide_backward(d_y, d_summed=d_sum, s=x, weight=weight, mean=None, rstd=rstd)[:2]
    backward = _backward_for(machine(x.device), M, N, d_sum is not None)
    partial = empty_matrix(backward.grid[0], columns=N, dtype=torch.float32, like=x)
    backward.launch(d_y, x if d_sum is None else d_sum, x, weight, rstd, d_x, partial)
    return d_x, column_sums(partial, dtype=weight.dtype)


def _cpu_fwd(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> list[Tensor]:
    M, N = rows_of(x)
    y, total = torch.empty_like(x), x if residual is None else x + residual
    rstd = torch.empty((M, 1), dtype=torch.float32, device="cpu")
    weight32 = weight.float()
    rows, y_rows, total_rows = rows_per_piece(N), y.view(M, N), total.view(M, N)
    if rows >= M and y.dtype == torch.float32:  # a decoding step: one piece, without cuts
        torch.linalg.vector_norm(total_rows, dim=1, keepdim=True, out=rstd)
        rstd.square_().div_(N).add_(eps).rsqrt_()
        torch.mul(total_rows, rstd, out=y_rows).mul_(weight32)
        return [y, rstd.view(M)] if residual is None else [y, rstd.view(M), total]
    for start in range(0, M, rows):
        cut = slice(start, start + rows)
        x32 = scaled_float32(total_rows[cut].view(-1), scale=1.0).view(-1, N)
        r = torch.linalg.vector_norm(x32, dim=1, keepdim=True, out=rstd[cut])
        r.square_().div_(N).add_(eps).rsqrt_()
        if y.dtype == torch.float32:
            torch.mul(x32, r, out=y_rows[cut]).mul_(weight32)
        else:
            y_rows[cut].copy_(x32.mul_(r).mul_(weight32))
    return [y, rstd.view(M)] if residual is None else [y, rstd.view(M), total]


def _cpu_bwd(d_y: Tensor, d_sum: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    # Through u = d_y * x: mean(d_y * weight * x) is the matrix-vector product u @ weight, d_weight is rstd @ u.
    (M, N), shape = rows_of(x), x.shape
    d_y, x, d_sum = d_y.view(M, N), x.view(M, N), None if d_sum is None else d_sum.view(M, N)
    d_x = torch.empty_like(x)
    weight32 = weight.float()
    d_weight = torch.zeros(N, dtype=torch.float32, device="cpu")
    rows = rows_per_piece(N)
    for start in range(0, M, rows):
        cut = slice(start, start + rows)
        x32 = scaled_float32(x[cut].view(-1), scale=1.0, slot=0).view(-1, N)
        d_y32 = scaled_float32(d_y[cut].view(-1), scale=1.0, slot=1).view(-1, N)
        r = rstd[cut]
        u = torch.mul(d_y32, x32, out=scratch(x32.numel(), slot=2).view(-1, N))
        d_weight.addmv_(u.t(), r)
        slope = torch.mv(u, weight32).mul_(r).mul_(r).mul_(r).div_(-N)
        target = d_x[cut] if d_x.dtype == torch.float32 else u
        torch.mul(d_y32, weight32, out=target).mul_(r[:, None]).addcmul_(x32, slope[:, None])
        if d_sum is not None:
            target.add_(d_sum[cut])
        if target is u:
            d_x[cut].copy_(u)
    return d_x.view(shape), d_weight.to(weight.dtype)


_forward = register(
    "rms_norm(Tensor x, Tensor? residual, Tensor weight, float eps) -> Tensor[]",  # the sum last, if there is one
    triton=_launch_fwd,
    cpu=_cpu_fwd,
    fake=lambda x, residual, weight, eps: [
        torch.empty_like(x),
        x.new_empty(rows_of(x)[0], dtype=torch.float32),
        *(torch.empty_like(x) for _ in range(residual is not None)),
    ],
)
_backward = register(
    "rms_norm_backward(Tensor d_y, Tensor? d_sum, Tensor x, Tensor weight, Tensor rstd) -> (Tensor, Tensor)",
    triton=_launch_bwd,
    cpu=_cpu_bwd,
    fake=lambda d_y, d_sum, x, weight, rstd: (torch.empty_like(x), torch.empty_like(weight)),
)


class _RMSNorm(OnceFunction):
    @staticmethod
    def forward(ctx, x, residual, weight, eps):
        y, rstd, *total = _forward(x, residual, weight, eps)
        ctx.save_for_backward(*(total or [x]), weight, rstd)
        return (y, *total) if total else y

    @staticmethod
    def backward(ctx, d_y, d_sum=None):
        d_sum = None if d_sum is None else d_sum.contiguous()
        d_x, d_weight = _backward(d_y.contiguous(), d_sum, *ctx.saved_tensors)
        return d_x, None if d_sum is None else d_x, d_weight, None


def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float = 1e-6, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; float32 inside, rounded once.

    x: [..., N]; weight: [N], any of the three dtypes; returns [..., N] in the dtype of x. With `residual` [..., N] of the
    dtype of x, normalises x + residual and returns (normalised, x + residual). Gradients for x, residual and weight.
    Raises ValueError for other shapes, and a residual of another dtype.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm: weight is {tuple(weight.shape)}; x {tuple(x.shape)} needs ({x.shape[-1]},)")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"rms_norm: residual {tuple(residual.shape)} {residual.dtype} must match x {tuple(x.shape)} {x.dtype}"
        )
    if needs_reference():
        return rms_norm_reference(x, weight, eps=eps, residual=residual)
    x, residual = x.contiguous(), None if residual is None else residual.contiguous()
    if is_plain():
        y, _, *total = _forward(x, residual, weight, eps)
        return (y, *total) if total else y
    return _RMSNorm.apply(x, residual, weight, eps)


def rms_norm_reference(
    x: Tensor, weight: Tensor, *, eps: float = 1e-6, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """The same in plain torch, float32 inside."""
    if residual is not None:
        x = x + residual
    x_c = x.to(compute_dtype(x))
    y = x_c * torch.rsqrt(x_c.square().mean(-1, keepdim=True) + eps) * weight.to(x_c.dtype)
    return y.to(x.dtype) if residual is None else (y.to(x.dtype), x)


def _eager(x: Tensor, weight: Tensor, *, eps: float = 1e-6, residual: Tensor | None = None):
    if residual is not None:
        x = x + residual
    y = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
    return y if residual is None else (y, x)


def _make_inputs(
    shape: tuple[int, ...], *, dtype: torch.dtype, device: str, with_residual: bool = False
) -> dict[str, object]:
    return {
        "x": torch.randn(shape, device=device).to(dtype),
        "weight": (1 + 0.1 * torch.randn(shape[-1], device=device)).to(dtype),
        "residual": torch.randn(shape, device=device).to(dtype) if with_residual else None,
    }


SPEC = OpSpec(
    name="rms_norm",
    op=rms_norm,
    reference=rms_norm_reference,
    eager=_eager,
    make_inputs=_make_inputs,
    differentiable=("x", "weight", "residual"),
    small_shapes=((1, 16), (3, 41), (2, 3, 130), (37, 64), (2, 1025)),  # not one column: its d_x cancels
    bench_shapes=((8192, 4096), (4096, 16384)),
    variants=({}, {"with_residual": True}),
    num_bytes=lambda shape, itemsize: 2 * shape[0] * shape[1] * itemsize,
    num_bytes_backward=lambda shape, itemsize: 3 * shape[0] * shape[1] * itemsize,
    num_flops=lambda shape: 4 * shape[0] * shape[1],
)
