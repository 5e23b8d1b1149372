"""SwiGLU: out = silu(gate) * up, elementwise.

Forward reads 2N and writes N; backward recomputes sigmoid(gate) instead of saving it (reads 3N, writes 2N), so autograd
keeps only the two inputs.

    d_up   = d_out * silu(gate)
    d_gate = d_out * up * sigmoid(gate) * (1 + gate * (1 - sigmoid(gate)))

Shazeer, GLU variants improve transformer, https://arxiv.org/abs/2002.05202
"""

import torch
import triton.language as tl
from torch import Tensor

from ztk.kernels.launch.jit import jit
from ztk.kernels.launch.library import composite, needs_reference
from ztk.kernels.shared.glu import check_inputs, differentiable, make_inputs
from ztk.kernels.shared.math import cast
from ztk.kernels.shared.spec import OpSpec, compute_dtype


@jit
def _swiglu_fwd(gate_ptr, up_ptr, out_ptr, N, BLOCK: tl.constexpr):
    """out = gate * sigmoid(gate) * up"""
    i_n = tl.program_id(0).to(tl.int64)
    o_n = i_n * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < N
    b_gate = tl.load(gate_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_up = tl.load(up_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_out = b_gate * tl.sigmoid(b_gate) * b_up
    tl.store(out_ptr + o_n, cast(b_out, out_ptr.dtype.element_ty), mask=m_n)


@jit
def _swiglu_bwd(d_out_ptr, gate_ptr, up_ptr, d_gate_ptr, d_up_ptr, N, BLOCK: tl.constexpr):
    """d_up = d_out * silu(gate); d_gate = d_out * up * sigmoid(gate) * (1 + gate * (1 - sigmoid(gate)))"""
    i_n = tl.program_id(0).to(tl.int64)
    o_n = i_n * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < N
    b_d_out = tl.load(d_out_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_gate = tl.load(gate_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_up = tl.load(up_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_sigmoid = tl.sigmoid(b_gate)
    b_d_up = b_d_out * b_gate * b_sigmoid
    b_d_gate = b_d_out * b_up * b_sigmoid * (1.0 + b_gate * (1.0 - b_sigmoid))
    tl.store(d_gate_ptr + o_n, cast(b_d_gate, d_gate_ptr.dtype.element_ty), mask=m_n)
    tl.store(d_up_ptr + o_n, cast(b_d_up, d_up_ptr.dtype.element_ty), mask=m_n)


_differentiable = differentiable(
    "swiglu",
    forward=_swiglu_fwd,
    backward=_swiglu_bwd,
    activation=torch.ops.aten.silu.out,
    activation_backward=torch.ops.aten.silu_backward.grad_input,
)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up. Both [...], same shape and dtype; returns that shape, contiguous. Gradients for both."""
    check_inputs("swiglu", gate=gate, up=up)
    if needs_reference():
        return swiglu_reference(gate, up)
    if composite(gate):
        return _eager(gate, up)
    return _differentiable(gate, up)


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up in float32, rounded once."""
    gate_c, up_c = gate.to(compute_dtype(gate)), up.to(compute_dtype(up))
    return (gate_c * torch.sigmoid(gate_c) * up_c).to(gate.dtype)


def _eager(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up


SPEC = OpSpec(
    name="swiglu",
    op=swiglu,
    reference=swiglu_reference,
    eager=_eager,
    make_inputs=make_inputs,
    differentiable=("gate", "up"),
    small_shapes=((1, 1), (3, 41), (2, 3, 130), (2, 1025), (0, 8)),
    bench_shapes=((8192, 4096), (8192, 14336)),
    num_bytes=lambda shape, itemsize: 3 * shape[0] * shape[1] * itemsize,
    num_bytes_backward=lambda shape, itemsize: 5 * shape[0] * shape[1] * itemsize,
    num_flops=lambda shape: 5 * shape[0] * shape[1],
)
