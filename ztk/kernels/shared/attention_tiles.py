"""Tiles of `attention`: their sizes on each kind of machine, the visible blocks of a block, and the CPU's view of sequences.

A program holds one block (queries in forward and in the kernel of dQ, keys in the kernel of dK and dV) and walks the sequence in steps of
the other. Every entry of the tables is the largest that compiles without a spill on Triton 3.6 to 3.9, or has a comment with the reason.
Two things limit them: on Hopper a warp group owns 64 rows, so 8 warps need 128 of them or compute twice; the accumulators of the held block
take held * head_dim / threads registers. A mask has the dtype of the scores.
"""

import itertools
from dataclasses import dataclass
from enum import StrEnum

import torch
import triton
import triton.language as tl
from torch import Tensor

from ztk.kernels.launch.machine import Architecture

LIMITS = (64, 128, 256)  # head dimensions up to which the columns of the tables reach


class Part(StrEnum):
    """The kernels of attention, by their outputs."""

    forward = "forward"
    keys = "keys"  # dK, dV
    queries = "queries"  # dQ


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """The block a program holds, the block it walks in steps of, warps and pipeline stages."""

    held: int
    step: int
    num_warps: int
    num_stages: int


# (held, step, warps, stages) for head dimensions up to 64, 128 and 256, 16-bit tensors
_TABLE = {
    Part.forward: {
        Architecture.ampere: ((128, 64, 8, 3), (128, 32, 8, 3), (64, 32, 8, 2)),
        Architecture.hopper: ((128, 128, 8, 3), (128, 64, 8, 3), (128, 32, 8, 2)),
        Architecture.blackwell: ((128, 128, 8, 3), (128, 64, 8, 3), (128, 32, 8, 2)),
        Architecture.cdna: ((128, 64, 4, 2), (128, 64, 4, 1), (64, 32, 8, 2)),
    },
    Part.keys: {
        Architecture.ampere: ((64, 32, 8, 2), (64, 32, 8, 2), (32, 32, 8, 1)),
        Architecture.hopper: ((128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 2)),
        Architecture.blackwell: ((128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 1)),
        Architecture.cdna: ((64, 32, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1)),
    },
    Part.queries: {
        Architecture.ampere: ((128, 32, 8, 2), (64, 64, 8, 2), (64, 32, 8, 1)),
        Architecture.hopper: ((128, 64, 8, 2), (128, 64, 8, 2), (128, 32, 8, 1)),
        Architecture.blackwell: ((128, 64, 8, 2), (128, 64, 8, 2), (128, 32, 8, 1)),
        Architecture.cdna: ((128, 32, 8, 2), (64, 32, 4, 1), (64, 32, 4, 1)),
    },
}
# float32, whose products run without matrix instructions of full rate, on every machine; (held, step, warps)
_FLOAT32 = {
    Part.forward: ((32, 32, 4), (32, 32, 8), (32, 32, 8)),
    Part.keys: ((32, 32, 8), (32, 16, 8), (16, 16, 8)),
    Part.queries: ((32, 32, 4), (32, 32, 4), (16, 16, 8)),
}


def tiles_for(part: Part, *, head_dim: int, itemsize: int, architecture: Architecture) -> Tiles:
    """The tiles of one kernel for heads of `head_dim` elements of `itemsize` bytes."""
    column = next(i for i, limit in enumerate(LIMITS) if head_dim <= limit)
    if itemsize == 4:
        held, step, num_warps = _FLOAT32[part][column]
        return Tiles(held=held, step=step, num_warps=num_warps, num_stages=1)
    held, step, num_warps, num_stages = _TABLE[part][architecture][column]
    return Tiles(held=held, step=step, num_warps=num_warps, num_stages=num_stages)


@triton.jit
def program_place(T, BLOCK: tl.constexpr):
    """(sequence and head, block, number of blocks) = (i_p // cdiv(T, BLOCK), i_p % cdiv(T, BLOCK), cdiv(T, BLOCK))"""
    # On one grid axis, since the second ends at 65535. A grid has fewer than 2^31 programs, and 64-bit division is slow.
    i_p = tl.program_id(0).to(tl.int64).to(tl.int32)
    num_blocks = tl.cdiv(T, BLOCK)
    return (i_p // num_blocks).to(tl.int64), (i_p % num_blocks).to(tl.int64), num_blocks


@triton.jit
def sequence_bounds(cu_seqlens_ptr, i_b, T):
    """(first token int64, length int32) of sequence i_b"""
    if cu_seqlens_ptr is not None:
        start = tl.load(cu_seqlens_ptr + i_b).to(tl.int64)
        length = (tl.load(cu_seqlens_ptr + i_b + 1) - start).to(tl.int32)
    else:
        start = i_b.to(tl.int64) * T
        length = T
    return start, length


@triton.jit
def key_range(
    i_row, length, window, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """(first, first full, after the last full, after the last) key block starts visible to rows [i_row, i_row + BLOCK_M)"""
    last = length
    last_full = length // BLOCK_N * BLOCK_N
    if CAUSAL:
        last = tl.minimum(length, i_row + BLOCK_M)
        last_full = (i_row + 1) // BLOCK_N * BLOCK_N
    first = 0
    first_full = 0
    if HAS_WINDOW:
        first = tl.maximum(0, i_row - window + 1) // BLOCK_N * BLOCK_N
        first_full = tl.cdiv(tl.maximum(0, i_row + BLOCK_M - window), BLOCK_N) * BLOCK_N
        first_full = tl.minimum(first_full, tl.cdiv(last, BLOCK_N) * BLOCK_N)
    return first, first_full, tl.maximum(last_full, first_full), last


@triton.jit
def visible(o_m, o_n, length, window, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """mask of the pairs (query o_m, key o_n), which broadcast against each other"""
    m_mn = (o_m < length) & (o_n < length)
    if CAUSAL:
        m_mn = m_mn & (o_n <= o_m)
    if HAS_WINDOW:
        m_mn = m_mn & (o_n > o_m - window)
    return m_mn


def cpu_sequences(tokens: int, *, cu_seqlens: Tensor | None, T: int):
    """(first token, number of sequences, their common length) of each run the CPU can take as one batch.

    cu_seqlens: int32 [sequences + 1], or None for sequences of T tokens each.
    """
    if cu_seqlens is None:
        return [(0, tokens // max(T, 1), T)]
    found, first = [], 0
    for length, run in itertools.groupby(length for length in cu_seqlens.diff().tolist() if length):
        count = sum(1 for _ in run)
        found.append((first, count, length))
        first += count * length
    return found


def cpu_mask(T: int, *, window: int, dtype: torch.dtype) -> Tensor | None:
    """Additive mask [T, T] of a causal sliding window; None when there is no window."""
    if not window:
        return None
    distance = torch.arange(T)[:, None] - torch.arange(T)[None, :]
    return torch.zeros(T, T, dtype=dtype).masked_fill_((distance < 0) | (distance >= window), float("-inf"))


def batch_view(x: Tensor, *, first: int, count: int, T: int) -> Tensor:
    """[tokens, heads, D] -> [count, heads, T, D] of the sequences that begin at token `first`."""
    return x[first : first + count * T].unflatten(0, (count, T)).transpose(1, 2)
