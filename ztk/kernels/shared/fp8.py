"""Eight-bit floats (e4m3, no infinities, largest 448) as bytes, by integer operations.

They are the same on every architecture and on the interpreter: Ampere has no conversion of its own, and the interpreter loses the
carry of a mantissa that rounds up. torch's name for the bytes is `float8_e4m3fn`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = 448.0
_LARGEST = tl.constexpr(LARGEST)


@triton.jit
def decode_fp8(b_byte, HAS_NAN: tl.constexpr):
    """float16 of a byte / 256: the exponent's four bits are the lower ones of float16's five. Every e4m3 number is exact, 0x7f is NaN"""
    b_bits = ((b_byte & 0x80).to(tl.uint16) << 8) | ((b_byte & 0x7F).to(tl.uint16) << 7)
    if HAS_NAN:
        b_bits = tl.where((b_byte & 0x7F) == 0x7F, 0x7FFF, b_bits)
    return b_bits.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def encode_fp8(b_x):
    """The byte of float32 b_x rounded to nearest even, at most 448; NaN is 0x7f"""
    b_size = tl.minimum(tl.abs(b_x), _LARGEST)
    b_bits = b_size.to(tl.uint32, bitcast=True)
    b_normal = ((b_bits + 0x7FFFF + ((b_bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 steps are 2^-9, the weight of the last bit of 2^14.
    b_small = (b_size + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    b_byte = tl.where(b_size < 0.015625, b_small, b_normal)
    b_byte = tl.where(b_x == b_x, b_byte, 0x7F)
    return (b_byte | ((b_x.to(tl.uint32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def encode_e5m2(b_x):
    """The byte of float32 b_x as e5m2, rounded to nearest even, at most 57,344; NaN is 0x7f"""
    b_size = tl.minimum(tl.abs(b_x), 57344.0)
    b_bits = b_size.to(tl.uint32, bitcast=True)
    b_normal = ((b_bits + 0xFFFFF + ((b_bits >> 21) & 1)) >> 21) - (112 << 2)
    # Below 2^-14 steps are 2^-16, the weight of the last bit of 2^7.
    b_small = (b_size + 128.0).to(tl.uint32, bitcast=True) - 0x43000000
    b_byte = tl.where(b_size < 6.103515625e-05, b_small, b_normal)
    b_byte = tl.where(b_x == b_x, b_byte, 0x7F)
    return (b_byte | ((b_x.to(tl.uint32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


def to_fp8(x: Tensor) -> Tensor:
    """uint8 of x's shape: float x rounded to nearest even, at most 448."""
    return x.float().clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)


def from_fp8(x: Tensor) -> Tensor:
    """float32 of uint8 x's shape."""
    return x.view(torch.float8_e4m3fn).float()
