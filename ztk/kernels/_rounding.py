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


@triton.jit
def _mix(x):
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
    key = _mix(seed.to(tl.uint32) + step.to(tl.int32).to(tl.uint32) * 0x9E3779B9)
    return _mix((o_n.to(tl.uint32) + (o_n >> 32).to(tl.uint32) * 0x85EBCA6B) ^ key)


@triton.jit
def round_stochastic_bf16(b_x, b_random):
    """float32 b_x rounded to bfloat16 by the low 16 bits of b_random"""
    b_bits = b_x.to(tl.uint32, bitcast=True)
    b_up = b_bits + (b_random & 0xFFFF)
    b_bits = tl.where(b_x == b_x, b_up, b_bits)  # NaN must not wrap around into a number
    return (b_bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


def _mix_cpu(x: Tensor) -> Tensor:
    """`_mix` on int64 values below 2^32, in place."""
    x.bitwise_xor_(x >> 16)
    x.mul_(0x7FEB352D).bitwise_and_(_MASK)
    x.bitwise_xor_(x >> 15)
    x.mul_(0x846CA68B).bitwise_and_(_MASK)  # the product wraps modulo 2^64, which leaves its low half right
    return x.bitwise_xor_(x >> 16)


def random_bits_cpu(*, start: int, count: int, step: int, seed: int) -> Tensor:
    """`random_bits` of the indices [start, start + count): int64 [count], below 2^32."""
    key = int(_mix_cpu(torch.tensor((seed + step * 0x9E3779B9) & _MASK)))
    index = torch.arange(start, start + count)
    return _mix_cpu((((index & _MASK) + (index >> 32) * 0x85EBCA6B) & _MASK).bitwise_xor_(key))


def random_bits_like(x: Tensor, *, start: int, step: int, seed: int) -> Tensor:
    """`random_bits` of the elements of x [n], the first at index `start`: int64 [n] below 2^32 on x's device."""
    return random_bits_cpu(start=start, count=x.numel(), step=step, seed=seed).to(x.device)


def round_stochastic_bf16_cpu(x: Tensor, random: Tensor) -> Tensor:
    """float32 x rounded to bfloat16 by the low 16 bits of `random`, int64 of x's shape."""
    bits = x.view(torch.int32)
    up = bits + (random & 0xFFFF).to(torch.int32)
    return (torch.where(x == x, up, bits) >> 16).to(torch.int16).view(torch.bfloat16)
