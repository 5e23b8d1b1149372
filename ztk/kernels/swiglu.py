"""SwiGLU: out = silu(gate) * up, elementwise.

Forward reads 2N and writes N; backward recomputes sigmoid(gate) instead of saving it (reads 3N, writes 2N), so autograd
keeps only the two inputs.

    d_up   = d_out * silu(gate)
    d_gate = d_out * up * sigmoid(gate) * (1 + gate * (1 - sigmoid(gate)))

Shazeer, GLU variants improve transformer, https://arxiv.org/abs/2002.05202
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ztk.kernels._cpu import pieces
from ztk.kernels._glu import aot_case, check_inputs, launch_backward, launch_forward, make_inputs
from ztk.kernels._library import composite, register, use_reference
from ztk.kernels._math import cast
from ztk.kernels._spec import OpSpec, compute_dtype


@triton.jit
def _swiglu_fwd(gate_ptr, up_ptr, out_ptr, N, BLOCK: tl.constexpr):
    """out = gate * sigmoid(gate) * up"""
    i_n = tl.program_id(0).to(tl.int64)
    o_n = i_n * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < N
    b_gate = tl.load(gate_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_up = tl.load(up_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_out = b_gate * tl.sigmoid(b_gate) * b_up
    tl.store(out_ptr + o_n, cast(b_out, out_ptr.dtype.element_ty), mask=m_n)


@triton.jit
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


def _launch_fwd(gate: Tensor, up: Tensor) -> Tensor:
    return launch_forward(_swiglu_fwd, gate=gate, up=up)


def _launch_bwd(d_out: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return launch_backward(_swiglu_bwd, d_out=d_out, gate=gate, up=up)


def _cpu_fwd(gate: Tensor, up: Tensor) -> Tensor:
    result = torch.empty_like(gate)
    gate, up, out = gate.view(-1), up.view(-1), result.view(-1)
    for cut in pieces(out.numel()):
        torch.ops.aten.silu.out(gate[cut], out=out[cut]).mul_(up[cut])
    return result


def _cpu_bwd(d_out: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    results = torch.empty_like(gate), torch.empty_like(up)
    d_out, gate, up, d_gate, d_up = (x.view(-1) for x in (d_out, gate, up, *results))
    for cut in pieces(d_out.numel()):
        torch.ops.aten.silu.out(gate[cut], out=d_up[cut]).mul_(d_out[cut])
        torch.mul(d_out[cut], up[cut], out=d_gate[cut])
        torch.ops.aten.silu_backward.grad_input(d_gate[cut], gate[cut], grad_input=d_gate[cut])
    return results


_forward = register(
    "swiglu(Tensor gate, Tensor up) -> Tensor",
    triton=_launch_fwd,
    cpu=_cpu_fwd,
    fake=lambda gate, up: torch.empty_like(gate),
)
_backward = register(
    "swiglu_backward(Tensor d_out, Tensor gate, Tensor up) -> (Tensor, Tensor)",
    triton=_launch_bwd,
    cpu=_cpu_bwd,
    fake=lambda d_out, gate, up: (torch.empty_like(gate), torch.empty_like(up)),
)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _forward(gate, up)

    @staticmethod
    def backward(ctx, d_out: Tensor) -> tuple[Tensor, Tensor]:
        return _backward(d_out.contiguous(), *ctx.saved_tensors)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up. Both [...], same shape and dtype; returns that shape, contiguous. Gradients for both."""
    check_inputs("swiglu", gate, up=up)
    if use_reference():
        return swiglu_reference(gate, up)
    if composite(gate):
        return _eager(gate, up)
    return _SwiGLU.apply(gate.contiguous(), up.contiguous())


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
    aot=(
        aot_case(_swiglu_fwd, max_registers=40, max_instructions_per_element=24),
        aot_case(_swiglu_bwd, max_registers=64, max_instructions_per_element=32),
    ),
)
