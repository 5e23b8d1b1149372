"""Stochastic rounding from counted random bits, on the device and in torch, with the same bits in both.

The bits of an element are a hash of (seed, step, its index in the unpartitioned buffer): no state, the same for every
world size and for every cut of a partition. The mixer is Wellons' lowbias32 (https://nullprogram.com/blog/2018/07/31/):
eight integer instructions for 32 bits, where Philox takes about 25.

Rounding x to bfloat16 stochastically adds 16 random bits below the kept ones and truncates: the expected value is x.
Gupta et al., https://arxiv.org/abs/1502.02551
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_MASK = 0xFFFFFFFF
_HIGH = 0x85EBCA6B  # of the upper half of an index


@triton.jit
def mix(x):
    """lowbias32 of uint32 x"""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def random_bits(o_n, step, seed):
    """uint32 random bits for the int64 indices o_n, at the float32 scalar `step`."""
    key = mix(seed.to(tl.uint32) + step.to(tl.int32).to(tl.uint32) * 0x9E3779B9)
    return mix((o_n.to(tl.uint32) + (o_n >> 32).to(tl.uint32) * 0x85EBCA6B) ^ key)


@triton.jit
def round_stochastic_bf16(b_x, b_random):
    """float32 b_x rounded to bfloat16 by the low 16 bits of b_random"""
    b_bits = b_x.to(tl.uint32, bitcast=True)
    b_up = b_bits + (b_random & 0xFFFF)
    b_bits = tl.where(b_x == b_x, b_up, b_bits)  # NaN must not wrap around into a number
    return (b_bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


def mix_cpu(x: Tensor) -> Tensor:
    """`mix` on the bits of int32 x [n], in place: products wrap; a shift brings copies of the sign, that a mask takes off."""
    shifted = torch.empty_like(x)

    def fold(bits: int) -> None:
        torch.bitwise_right_shift(x, bits, out=shifted)
        x.bitwise_xor_(shifted.bitwise_and_((1 << (32 - bits)) - 1))

    fold(16)
    x.mul_(_int32(0x7FEB352D))
    fold(15)
    x.mul_(_int32(0x846CA68B))
    fold(16)
    return x


def _int32(bits: int) -> int:
    """The number that has the low 32 of `bits` as an int32."""
    return (bits + (1 << 31) & _MASK) - (1 << 31)


def random_bits_cpu(*, start: int, count: int, step: int, seed: int) -> Tensor:
    """`random_bits` of the indices [start, start + count): int32 [count], which have the same bits. count: below 2^31."""
    key = int(mix_cpu(torch.tensor(_int32(seed + step * 0x9E3779B9), dtype=torch.int32)))
    low, high = start & _MASK, start >> 32
    mixed = torch.arange(count, dtype=torch.int32).add_(_int32(low + high * _HIGH))
    carry = (1 << 32) - low  # from this element on the upper half of the index is one more
    if carry < count:
        mixed[carry:].add_(_int32(_HIGH))
    return mix_cpu(mixed.bitwise_xor_(key))


def random_bits_like(x: Tensor, *, start: int, step: int, seed: int) -> Tensor:
    """`random_bits` of the elements of x [n], the first at index `start`: int32 [n] on x's device."""
    return random_bits_cpu(start=start, count=x.numel(), step=step, seed=seed).to(x.device)


def round_stochastic_bf16_cpu(x: Tensor, random: Tensor) -> Tensor:
    """float32 x rounded to bfloat16 by the low 16 bits of `random`, int32 of x's shape."""
    bits = x.view(torch.int32)
    up = (random & 0xFFFF).add_(bits)
    return (torch.where(x == x, up, bits) >> 16).to(torch.int16).view(torch.bfloat16)
