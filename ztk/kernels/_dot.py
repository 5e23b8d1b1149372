"""Matrix products for kernels that must also run on the interpreter."""

import triton
import triton.language as tl

from ztk.kernels._math import INTERPRETED


@triton.jit
def dot(b_a, b_b, b_acc):
    """b_acc + b_a @ b_b in float32. The interpreter's product of bfloat16 operands is garbage, so it gets float32 ones."""
    if INTERPRETED:
        return tl.dot(b_a.to(tl.float32), b_b.to(tl.float32), b_acc, input_precision="ieee")
    else:
        return tl.dot(b_a, b_b, b_acc, input_precision="ieee")
