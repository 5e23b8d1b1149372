"""GeGLU: out = gelu(gate) * up, elementwise, with the tanh approximation of gelu.

    gelu(g) = g * sigmoid(2 u)              u = sqrt(2 / pi) * (g + 0.044715 g^3); sigmoid(2u) = (1 + tanh(u)) / 2
    d_up    = d_out * gelu(gate)
    d_gate  = d_out * up * (s + 2 g s (1 - s) u')                s = sigmoid(2u), u' = sqrt(2 / pi) * (1 + 0.134145 g^2)

Forward reads 2N and writes N; backward recomputes s instead of saving it (reads 3N, writes 2N), so autograd keeps only the
two inputs.

Shazeer, GLU variants improve transformer, https://arxiv.org/abs/2002.05202
"""

import functools
import math

import torch
import triton.language as tl
from torch import Tensor

from ztk.kernels.launch.jit import jit
from ztk.kernels.launch.library import composite, needs_reference
from ztk.kernels.shared.glu import check_inputs, differentiable, make_inputs
from ztk.kernels.shared.math import cast
from ztk.kernels.shared.spec import OpSpec, compute_dtype

_SQRT_2_OVER_PI = tl.constexpr((2 / math.pi) ** 0.5)
_TWICE_SQRT_2_OVER_PI = tl.constexpr(2 * (2 / math.pi) ** 0.5)


@jit
def _geglu_fwd(gate_ptr, up_ptr, out_ptr, N, BLOCK: tl.constexpr):
    """out = gelu(gate) * up"""
    i_n = tl.program_id(0).to(tl.int64)
    o_n = i_n * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < N
    b_gate = tl.load(gate_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_up = tl.load(up_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_s = tl.sigmoid((b_gate + 0.044715 * b_gate * b_gate * b_gate) * _TWICE_SQRT_2_OVER_PI)
    b_out = b_gate * b_s * b_up
    tl.store(out_ptr + o_n, cast(b_out, out_ptr.dtype.element_ty), mask=m_n)


@jit
def _geglu_bwd(d_out_ptr, gate_ptr, up_ptr, d_gate_ptr, d_up_ptr, N, BLOCK: tl.constexpr):
    """d_up = d_out * gelu(gate); d_gate = d_out * up * (s + 2 g s (1 - s) u')"""
    i_n = tl.program_id(0).to(tl.int64)
    o_n = i_n * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < N
    b_d_out = tl.load(d_out_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_gate = tl.load(gate_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_up = tl.load(up_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_square = b_gate * b_gate
    b_s = tl.sigmoid(b_gate * (1.0 + 0.044715 * b_square) * _TWICE_SQRT_2_OVER_PI)
    b_slope = (1.0 + 0.134145 * b_square) * _SQRT_2_OVER_PI
    b_d_up = b_d_out * b_gate * b_s
    b_d_gate = b_d_out * b_up * (b_s + 2.0 * b_gate * b_s * (1.0 - b_s) * b_slope)
    tl.store(d_gate_ptr + o_n, cast(b_d_gate, d_gate_ptr.dtype.element_ty), mask=m_n)
    tl.store(d_up_ptr + o_n, cast(b_d_up, d_up_ptr.dtype.element_ty), mask=m_n)


_differentiable = differentiable(
    "geglu",
    forward=_geglu_fwd,
    backward=_geglu_bwd,
    activation=functools.partial(torch.ops.aten.gelu.out, approximate="tanh"),
    activation_backward=functools.partial(torch.ops.aten.gelu_backward.grad_input, approximate="tanh"),
)


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up with the tanh approximation. Both [...], same shape and dtype; returns that shape, contiguous. Gradients for both."""
    check_inputs("geglu", gate=gate, up=up)
    if needs_reference():
        return geglu_reference(gate, up)
    if composite(gate):
        return _eager(gate, up)
    return _differentiable(gate, up)


def geglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up in float32, rounded once."""
    return _eager(gate.to(compute_dtype(gate)), up.to(compute_dtype(up))).to(gate.dtype)


def _eager(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


SPEC = OpSpec(
    name="geglu",
    op=geglu,
    reference=geglu_reference,
    eager=_eager,
    make_inputs=make_inputs,
    differentiable=("gate", "up"),
    small_shapes=((1, 1), (3, 41), (2, 3, 130), (2, 1025), (0, 8)),
    bench_shapes=((8192, 4096), (8192, 14336)),
    num_bytes=lambda shape, itemsize: 3 * shape[0] * shape[1] * itemsize,
    num_bytes_backward=lambda shape, itemsize: 5 * shape[0] * shape[1] * itemsize,
    num_flops=lambda shape: 10 * shape[0] * shape[1],
)
