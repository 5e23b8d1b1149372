"""Tiles of products of tokens with the weights of their experts: their sizes, and how one is computed.

A weight is read by pointers or by descriptors (`launch.descriptors`).
"""

import functools
from dataclasses import dataclass

import triton
import triton.language as tl

from ztk.kernels.launch.machine import Architecture
from ztk.kernels.shared.math import dot


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """Tile, reduction step, warps and pipeline stages. programs: number per processor. With two, one computes while the other stores its tile
    and loads the first steps of its next one."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    programs: int = 2

    @staticmethod
    @functools.cache
    def for_product(*, itemsize: int, architecture: Architecture) -> "LaunchConfig":
        """16-bit: 64 accumulators per thread, and as many stages as shared memory holds (64 KiB on CDNA). On Ampere operands of the products
        are in registers too, so that one program fits."""
        if itemsize == 4:
            return LaunchConfig(block_m=32, block_n=64, block_k=32, num_warps=4, num_stages=1)
        if architecture is Architecture.cdna:
            return LaunchConfig(block_m=128, block_n=128, block_k=32, num_warps=8, num_stages=2)
        programs = 1 if architecture is Architecture.ampere else 2
        return LaunchConfig(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=3, programs=programs)


@triton.jit
def _tile(weight, o_w, i_e, i_k, i_n, m_k, m_n, stride_d, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DESCRIBED: tl.constexpr,
          TRANSPOSED: tl.constexpr):  # fmt: skip
    """[BLOCK_K, BLOCK_N] of expert i_e's weight, from row i_k and column i_n of the [D, N] that x is multiplied with"""
    if DESCRIBED:
        if TRANSPOSED:
            b_w = tl.trans(weight.load([i_e, i_n, i_k]).reshape([BLOCK_N, BLOCK_K]))
        else:
            b_w = weight.load([i_e, i_k, i_n]).reshape([BLOCK_K, BLOCK_N])
    else:
        p_w = weight + tl.cast(i_k, tl.int64) * stride_d
        b_w = tl.load(p_w + o_w, mask=m_k[:, None] & m_n[None, :], other=0.0)
    return b_w


@triton.jit
def sum_of_products(x_ptr, weight, x2_ptr, weight2, o_x, o_w, i_e, i_n, m_s, m_n, D, stride_d, BLOCK_M: tl.constexpr,
             BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DESCRIBED: tl.constexpr, TRANSPOSED: tl.constexpr):  # fmt: skip
    """x @ weight over D columns, plus x2 @ weight2; o_x, o_w: offsets of the first BLOCK_K of them

    Of a pair one loop walks both: a loop each would keep the addresses of both in registers, and fill its pipeline anew.
    """
    o_k = tl.arange(0, BLOCK_K)
    b_acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    if x2_ptr is not None:
        num_k = tl.cdiv(D, BLOCK_K)
        for i in range(0, 2 * num_k):
            p_x = x_ptr
            w = weight
            if i >= num_k:
                p_x = x2_ptr
                w = weight2
            i_k = (i % num_k) * BLOCK_K
            m_k = i_k + o_k < D
            b_x = tl.load(p_x + i_k + o_x, mask=m_s[:, None] & m_k[None, :], other=0.0)
            b_w = _tile(w, o_w, i_e, i_k, i_n, m_k, m_n, stride_d, BLOCK_N, BLOCK_K, DESCRIBED, TRANSPOSED)
            b_acc = dot(b_x, b_w, b_acc)
    else:
        for i_k in range(0, D, BLOCK_K):
            m_k = i_k + o_k < D
            b_x = tl.load(x_ptr + i_k + o_x, mask=m_s[:, None] & m_k[None, :], other=0.0)
            b_w = _tile(weight, o_w, i_e, i_k, i_n, m_k, m_n, stride_d, BLOCK_N, BLOCK_K, DESCRIBED, TRANSPOSED)
            b_acc = dot(b_x, b_w, b_acc)
    return b_acc
