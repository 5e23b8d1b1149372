"""Sum of squares of a flat gradient in one read: its norm, and whether anything in it is infinite or NaN.

    out = sum(grad^2)          in float64, of sums in float32; not finite if and only if one element is not

Reads every gradient byte once. Elements that overflow float32 (a finite one above 1e19, or one that is not finite) are read again:
by a program, which then adds up squares of grad * 2^-80, or by a row of the CPU's, in float64. Deterministic: a fixed grid of
programs sums fixed strided tiles, and one more program adds the partial sums in a fixed order; no atomics, and nothing depends
on the machine's number of processors or threads.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ztk.kernels.launch.grids import cdiv
from ztk.kernels.launch.jit import Bound, bind, jit, kept
from ztk.kernels.launch.library import register, use_reference
from ztk.kernels.launch.memory import empty_vector
from ztk.kernels.shared.cpu import PIECE, UPDATE_PIECE, scaled_float32
from ztk.kernels.shared.spec import OpSpec

MAX_PROGRAMS = (
    512  # about four per multiprocessor of today's devices; a constant, so that results do not follow the device
)
NUM_WARPS = 8
BLOCK = 8192  # 32 elements per thread: four 16-byte loads of a 16-bit gradient in flight
# The square of the largest float32 is then 2^96; the lost part is below 2^-90 of a sum that overflowed.
SHRINK = tl.constexpr(2.0**-80)
GROW = tl.constexpr(2.0**160)
_INF = tl.constexpr(float("inf"))
ROW = 1024  # CPU: elements summed by one thread in a fixed order


@triton.jit
def _strided_sum(grad_ptr, N, num_tiles, scale, BLOCK: tl.constexpr):
    """Sum of squares of scale * grad over this program's tiles, float32"""
    i_program = tl.program_id(0).to(tl.int64)
    num_programs = tl.num_programs(0)
    b_sum = tl.zeros([BLOCK], dtype=tl.float32)
    start = i_program * BLOCK
    for _ in range(i_program, num_tiles, num_programs):
        o_n = start + tl.arange(0, BLOCK)
        b_g = tl.load(grad_ptr + o_n, mask=o_n < N, other=0.0).to(tl.float32) * scale
        b_sum += b_g * b_g
        start += num_programs.to(tl.int64) * BLOCK
    return tl.sum(b_sum, axis=0)


@jit
def _partial_sums(grad_ptr, partial_ptr, N, num_tiles, BLOCK: tl.constexpr):
    """partial[i] = sum of squares over tiles i, i + programs, i + 2 programs, ..."""
    total = _strided_sum(grad_ptr, N, num_tiles, 1.0, BLOCK)
    wide = total.to(tl.float64)
    if (total < _INF) == 0:  # rare; NaN compares false
        wide = _strided_sum(grad_ptr, N, num_tiles, SHRINK, BLOCK).to(tl.float64) * GROW
    tl.store(partial_ptr + tl.program_id(0).to(tl.int64), wide)


@jit
def _total(partial_ptr, out_ptr, P, BLOCK_P: tl.constexpr):
    """out = sum of the partial sums"""
    o_p = tl.arange(0, BLOCK_P)
    b_partial = tl.load(partial_ptr + o_p, mask=o_p < P, other=0.0)
    tl.store(out_ptr, tl.sum(b_partial, axis=0))


@kept
def _launches_for(N: int) -> tuple[Bound, Bound]:
    """The partial sums and their sum."""
    num_tiles = cdiv(N, BLOCK)
    programs = min(MAX_PROGRAMS, num_tiles)
    return (
        bind(_partial_sums, N, num_tiles, grid=(programs,), BLOCK=BLOCK, num_warps=NUM_WARPS, enable_fp_fusion=True),
        bind(_total, programs, grid=(1,), BLOCK_P=MAX_PROGRAMS, num_warps=4, enable_fp_fusion=True),
    )


def _launch(grad: Tensor) -> Tensor:
    N, out = grad.numel(), empty_vector(1, dtype=torch.float64, like=grad)
    if not N:
        return out.zero_()
    partial = empty_vector(MAX_PROGRAMS, dtype=torch.float64, like=grad)
    partial_sums, total = _launches_for(N)
    partial_sums.launch(grad, partial)
    total.launch(partial, out)
    return out


def _cpu(grad: Tensor) -> Tensor:
    # torch splits a reduction to one value between threads, but gives each row of a row reduction to one thread: rows of
    # fixed length make the result a function of the content alone.
    n = grad.numel()
    in_rows = n - n % ROW
    norms = torch.empty(in_rows // ROW, dtype=torch.float32, device="cpu")
    step = max(in_rows, 1) if grad.dtype == torch.float32 else UPDATE_PIECE
    for start in range(0, in_rows, step):
        piece = scaled_float32(grad[start : min(start + step, in_rows)], scale=1.0).view(-1, ROW)
        torch.linalg.vector_norm(piece, dim=1, out=norms[start // ROW : start // ROW + piece.shape[0]])
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    overflowed = norms.isfinite().logical_not_().nonzero().flatten().tolist()
    for row in overflowed:
        total += grad[row * ROW : (row + 1) * ROW].double().square_().sum()
        norms[row] = 0.0
        if not math.isfinite(total):  # an element is not finite
            return total.reshape(1)
    for start in range(0, norms.numel(), PIECE // 4):  # below torch's threshold for splitting
        total += norms[start : start + PIECE // 4].double().square_().sum()
    if in_rows < n:
        total += grad[in_rows:].double().square_().sum()
    return total.reshape(1)


_op = register(
    "sum_of_squares(Tensor grad) -> Tensor",
    triton=_launch,
    cpu=_cpu,
    fake=lambda grad: torch.empty(1, dtype=torch.float64, device=grad.device),
)


def sum_of_squares(grad: Tensor) -> Tensor:
    """The sum of squares of grad [n] (float32, bfloat16 or float16, contiguous) as float64 [1] on its device: it does not overflow.

    Raises ValueError for other shapes and dtypes.
    """
    if grad.dim() != 1 or not grad.is_contiguous() or not grad.is_floating_point():
        raise ValueError(
            f"sum_of_squares: grad is {tuple(grad.shape)} {grad.dtype}; pass a contiguous flat floating-point tensor"
        )
    return sum_of_squares_reference(grad) if use_reference() else _op(grad)


def sum_of_squares_reference(grad: Tensor) -> Tensor:
    """The same sum in plain torch, in float64."""
    return grad.double().square().sum().reshape(1)


def _make_inputs(
    shape: tuple[int, ...], *, dtype: torch.dtype, device: str, poison: float | None = None
) -> dict[str, object]:
    grad = torch.randn(shape, device=device).to(dtype)
    if poison is not None and grad.numel():
        grad[-1] = poison
    return {"grad": grad}


SPEC = OpSpec(
    name="sum_of_squares",
    op=sum_of_squares,
    reference=sum_of_squares_reference,
    make_inputs=_make_inputs,
    small_shapes=((1,), (17,), (1025,), (8193,), (100_000,), (0,)),
    bench_shapes=((1 << 28,), (1_000_000_000,)),
    variants=({}, {"poison": float("inf")}, {"poison": float("nan")}, {"poison": 1e25}),
    tolerance_ulps=2.0 * 2**29,  # in float64's ulps: partial sums are float32
    num_bytes=lambda shape, itemsize: shape[0] * itemsize,
    num_flops=lambda shape: 2 * shape[0],
)
