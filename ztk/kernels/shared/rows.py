"""Common code of kernels over rows: the number of rows per program, and the second stage of a sum over rows."""

import functools
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from ztk.kernels.launch.grids import cdiv, next_power_of_2
from ztk.kernels.launch.jit import Bound, bind, jit, kept
from ztk.kernels.launch.memory import empty_vector
from ztk.kernels.shared.math import cast

TILE = 4096  # elements in flight per program before a row alone is larger
ELEMENTS_PER_THREAD = 16  # two 16-byte loads of a 16-bit type
MAX_THREADS = 512
COLUMNS = 128  # columns one program of `column_sums` adds up
ROWS_AT_ONCE = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLaunch:
    """How a kernel that holds full rows in registers is launched."""

    block_m: int  # rows per program
    block_n: int  # columns, the next power of two
    num_warps: int


@functools.cache
def row_launch(N: int, *, warp_size: int, max_threads: int = MAX_THREADS) -> RowLaunch:
    """Several short rows per program, one long row; threads follow the elements held."""
    block_n = next_power_of_2(N)
    block_m = max(1, min(16, TILE // block_n))
    threads = min(max_threads, block_m * block_n // ELEMENTS_PER_THREAD)
    return RowLaunch(block_m=block_m, block_n=block_n, num_warps=max(1, threads // warp_size))


def rows_of(x: Tensor) -> tuple[int, int]:
    """M and N of x [..., N], contiguous and of any dtype: M rows of N elements."""
    N = x.shape[-1]
    return x.numel() // N, N


@jit
def _column_sums(partial_ptr, out_ptr, P, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """out[n] = sum over p of partial[p, n], in a fixed order"""
    i_n = tl.program_id(0).to(tl.int64)
    o_n = i_n * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < N
    b_sum = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for start in range(0, P, ROWS):
        o_p = start + tl.arange(0, ROWS).to(tl.int64)
        m = (o_p < P)[:, None] & m_n[None, :]
        b_sum += tl.load(partial_ptr + o_p[:, None] * N + o_n[None, :], mask=m, other=0.0)  # [ROWS, BLOCK]
    tl.store(out_ptr + o_n, cast(tl.sum(b_sum, axis=0), out_ptr.dtype.element_ty), mask=m_n)


@kept
def _sums_for(P: int, N: int) -> Bound:
    return bind(
        _column_sums,
        P,
        N,
        grid=(cdiv(N, COLUMNS),),
        ROWS=ROWS_AT_ONCE,
        BLOCK=COLUMNS,
        num_warps=4,
        enable_fp_fusion=True,
    )


def column_sums(partial: Tensor, *, dtype: torch.dtype) -> Tensor:
    """The sums of float32 [P, N] over its rows, as [N] in `dtype`: the second stage of a weight's gradient."""
    P, N = partial.shape
    out = empty_vector(N, dtype=dtype, like=partial)
    _sums_for(P, N).launch(partial, out)
    return out
