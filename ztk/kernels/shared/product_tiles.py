"""Products of rows of x with weights as they are stored: one tile in a kernel, and all of them on a CPU."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ztk.kernels.launch.grids import cdiv
from ztk.kernels.launch.machine import Architecture, Machine
from ztk.kernels.shared.math import dot
from ztk.kernels.shared.weight_formats import BLOCK, GROUP, load_int4, load_steps, scale_of

_HALF = tl.constexpr(BLOCK // 2)  # bytes of a block of int4
_GROUPS = tl.constexpr(BLOCK // 2 // GROUP)  # in half a block
_COLUMNS = 16
ROWS = 64  # of the matrix instruction that is the same for every number of rows


# Bytes of weights that a processor must have asked for to keep its share of the memory busy: 4.8 TB/s times a microsecond over 132, and
# 8 TB/s over 148.
_IN_FLIGHT = {Architecture.hopper: 36 << 10, Architecture.blackwell: 54 << 10}
_MANY = 128  # rows of a program of many, with 256 outputs: 0.023 bytes per multiply-add from the second-level cache
_MANY_BYTES = 192 << 10  # of shared memory of such a program, which has a processor alone
# Of a program, by programs of a processor; the rest is for the next kernel, which starts early.
_SHARED_BYTES = {1: 128 << 10, 2: 113 << 10}


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """Outputs and inputs of a program's step, warps and pipeline stages."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    block_m: int = ROWS

    @staticmethod
    def for_many(M: int, N: int, *, target: Machine, products: int) -> "LaunchConfig | None":
        """Tiles of many rows on Hopper with 16-bit weights; None if they leave a processor without a program. products: number of weights, 2
        for gate and up. A step over inputs is that of `for_weight`, so an output is the same sum in the same order."""
        block_n = 256 // products  # registers hold the tiles of both
        if target.architecture is not Architecture.hopper or cdiv(M, _MANY) * cdiv(N, block_n) < target.processors:
            return None
        block_k = LaunchConfig.for_weight(N, itemsize=2, target=target).block_k
        stages = min(4, _MANY_BYTES // (2 * block_k * (_MANY + block_n)))
        return LaunchConfig(block_n=block_n, block_k=block_k, num_warps=8, num_stages=stages, block_m=_MANY)

    @staticmethod
    def for_weight(N: int, *, itemsize: int, target: Machine, groups: int = 1) -> "LaunchConfig":
        """itemsize: bytes of an element of x; groups: how many times the programs cover all outputs, such as once per expert.

        A program has as many outputs as leave programs for three of four processors. Programs for less than two rounds of processors load
        further ahead, which changes no bit.
        """
        block_n = 128
        while block_n > 16 and cdiv(N, block_n) < target.processors * 3 // 4:
            block_n //= 2
        if itemsize == 4:
            return LaunchConfig(block_n=min(block_n, 32), block_k=32, num_warps=4, num_stages=1)
        block_k = 64 if block_n == 128 else 128
        stages = 2 if target.architecture is Architecture.cdna else 3
        stages = max(stages, _stages(block_n, block_k, programs=cdiv(N, block_n) * groups, target=target))
        num_warps = 8 if block_n == 128 else 4  # with four, the two tiles of gate and up spill
        return LaunchConfig(block_n=block_n, block_k=block_k, num_warps=num_warps, num_stages=stages)


def _stages(block_n: int, block_k: int, *, programs: int, target: Machine) -> int:
    """Pipeline stages, of 16-bit weights and 64 rows, that keep `_IN_FLIGHT` bytes of weights in flight. One stage is multiplied."""
    resident = cdiv(programs, target.processors)
    if target.architecture not in _IN_FLIGHT or resident not in _SHARED_BYTES:
        return 0
    weights, rows = 2 * block_n * block_k, 2 * ROWS * block_k
    ahead = cdiv(_IN_FLIGHT[target.architecture] * target.processors, programs * weights)
    return min(1 + ahead, _SHARED_BYTES[resident] // (weights + rows))


@triton.jit
def product_tile(
    x_ptr, weight_ptr, scales_ptr, o_x, m_m, o_n, m_n, N, K, FORMAT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x W^T of one tile, float32 [BLOCK_M, BLOCK_N], summed over inputs from 0 on; o_x: int64, where its rows begin"""
    dtype = x_ptr.dtype.element_ty
    b_acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    if FORMAT == "int4":
        o_h = tl.arange(0, _HALF)
        row_bytes = tl.cdiv(K, 2 * _HALF) * _HALF
        for i_b in range(0, tl.cdiv(K, 2 * _HALF)):
            o_w = o_n.to(tl.int64)[None, :] * row_bytes + (o_h + i_b * _HALF)[:, None]
            p_scale = scales_ptr + (tl.cast(i_b, tl.int64) * (2 * _GROUPS) * N + o_n) * 2
            b_low_w, b_high_w = load_int4(weight_ptr + o_w, m_n[None, :], p_scale, m_n, 2 * N, _GROUPS, False)
            o_k = o_h + i_b * (2 * _HALF)
            b_low = tl.load(x_ptr + o_x[:, None] + o_k[None, :], mask=m_m[:, None] & (o_k < K)[None, :], other=0.0)
            o_k += _HALF
            b_high = tl.load(x_ptr + o_x[:, None] + o_k[None, :], mask=m_m[:, None] & (o_k < K)[None, :], other=0.0)
            b_acc = dot(b_low, b_low_w.to(dtype), b_acc)
            b_acc = dot(b_high, b_high_w.to(dtype), b_acc)
        return b_acc
    else:
        o_k = tl.arange(0, BLOCK_K)
        p_x = x_ptr + o_x[:, None] + o_k[None, :]
        p_w = weight_ptr + o_n.to(tl.int64)[None, :] * K + o_k[:, None]
        for i_k in range(0, K, BLOCK_K):
            m_k = i_k + o_k < K
            b_x = tl.load(p_x, mask=m_m[:, None] & m_k[None, :], other=0.0)
            b_w = load_steps(p_w, m_k[:, None] & m_n[None, :], FORMAT, dtype)
            b_acc = dot(b_x, b_w, b_acc)
            p_x += BLOCK_K
            p_w += BLOCK_K
        return b_acc * scale_of(scales_ptr, o_n, m_n, FORMAT)[None, :]


@triton.jit
def described_product(
    x, weight, first_m, first_n, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """x W^T of one tile, float32 [BLOCK_M, BLOCK_N], summed as in `product_tile`; x and weight: descriptors"""
    b_acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for i_k in range(0, K, BLOCK_K):
        b_acc = dot(x.load([first_m, i_k]), tl.trans(weight.load([first_n, i_k])), b_acc)
    return b_acc


@triton.jit
def few_product(
    x_ptr, weight_ptr, scales_ptr, o_m, m_m, o_n, m_n, N, K, FORMAT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x W^T of one tile, float32 [BLOCK_M, BLOCK_N], element by element; BLOCK_K separate sums are added up at the end"""
    b_acc = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_K], dtype=tl.float32)
    o_x = o_m.to(tl.int64) * K
    if FORMAT == "int4":
        o_h = tl.arange(0, BLOCK_K)  # half a block
        row_bytes = tl.cdiv(K, 2 * BLOCK_K) * BLOCK_K
        for i_b in range(0, tl.cdiv(K, 2 * BLOCK_K)):
            o_w = o_n.to(tl.int64)[:, None] * row_bytes + (o_h + i_b * BLOCK_K)[None, :]
            p_scale = scales_ptr + (tl.cast(i_b, tl.int64) * (2 * _GROUPS) * N + o_n) * 2
            b_low_w, b_high_w = load_int4(weight_ptr + o_w, m_n[:, None], p_scale, m_n, 2 * N, _GROUPS, True)
            o_k = o_h + i_b * (2 * BLOCK_K)
            b_low = tl.load(x_ptr + o_x[:, None] + o_k[None, :], mask=m_m[:, None] & (o_k < K)[None, :], other=0.0)
            o_k += BLOCK_K
            b_high = tl.load(x_ptr + o_x[:, None] + o_k[None, :], mask=m_m[:, None] & (o_k < K)[None, :], other=0.0)
            b_acc += b_low.to(tl.float32)[:, None, :] * b_low_w[None, :, :]
            b_acc += b_high.to(tl.float32)[:, None, :] * b_high_w[None, :, :]
    else:
        for i_k in range(0, K, BLOCK_K):
            o_k = i_k + tl.arange(0, BLOCK_K)
            m_k = o_k < K
            p_w = weight_ptr + o_n.to(tl.int64)[:, None] * K + o_k[None, :]
            b_w = load_steps(p_w, m_n[:, None] & m_k[None, :], FORMAT, tl.float32)
            b_x = tl.load(x_ptr + o_x[:, None] + o_k[None, :], mask=m_m[:, None] & m_k[None, :], other=0.0)
            b_acc += b_x.to(tl.float32)[:, None, :] * b_w[None, :, :]
    return tl.sum(b_acc, axis=2) * scale_of(scales_ptr, o_n, m_n, FORMAT)[None, :]


def times_rows(x: Tensor, weight: Tensor) -> Tensor:
    """float32 x [M, K] times weight [N, K] transposed, [M, N]. oneDNN's rows have the same bits for every number of rows but one, if there
    are enough columns."""
    N = weight.shape[0]
    if not torch.backends.mkldnn.is_available() or not x.numel() or not N:
        return F.linear(x, weight)
    rows = x.repeat(2, 1) if len(x) == 1 else x
    wide = F.pad(weight, (0, 0, 0, _COLUMNS - N)) if N < _COLUMNS else weight
    product = torch.ops.mkldnn._linear_pointwise(rows.contiguous(), wide.contiguous(), None, "none", [], "")
    return product[: len(x), :N].contiguous()
