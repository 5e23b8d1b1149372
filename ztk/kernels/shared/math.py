"""Device functions shared by the kernels."""

import triton
import triton.language as tl

# The interpreter truncates float32 to bfloat16; compiled code rounds to nearest even. Read when kernels are decorated.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def cast(b_x, dtype: tl.constexpr):
    """b_x (float32) rounded to nearest even in `dtype`, on the interpreter too."""
    if INTERPRETED and dtype == tl.bfloat16:
        b_bits = b_x.to(tl.uint32, bitcast=True)
        b_rounded = (b_bits + 0x7FFF + ((b_bits >> 16) & 1)) & 0xFFFF0000
        b_bits = tl.where(b_x == b_x, b_rounded, b_bits)  # NaN must not round into infinity
        return b_bits.to(tl.uint32).to(tl.float32, bitcast=True).to(tl.bfloat16)
    else:
        return b_x.to(dtype)


@triton.jit
def dot(b_a, b_b, b_acc):
    """b_acc + b_a @ b_b in float32. The interpreter's product of bfloat16 operands is garbage, so it gets float32 ones."""
    if INTERPRETED:
        return tl.dot(b_a.to(tl.float32), b_b.to(tl.float32), b_acc, input_precision="ieee")
    else:
        return tl.dot(b_a, b_b, b_acc, input_precision="ieee")
