"""Common code of `swiglu` and `geglu`: both multiply an activation of one tensor with another, elementwise."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ztk.kernels.launch.direct import is_plain
from ztk.kernels.launch.functions import OnceFunction
from ztk.kernels.launch.grids import cdiv
from ztk.kernels.launch.jit import Bound, bind, kept
from ztk.kernels.launch.library import register
from ztk.kernels.launch.machine import Machine, machine
from ztk.kernels.shared.cpu import pieces

NUM_WARPS = 4
PER_THREAD = 8  # 16-bit elements: one 16-byte access per tensor


def _for_elements(kernel: Any) -> Callable[[Machine, int], Bound]:
    """A machine and a number of elements -> the kernel."""

    @kept
    def bound(target: Machine, N: int) -> Bound:
        block = PER_THREAD * target.warp_size * NUM_WARPS
        return bind(kernel, N, grid=(cdiv(N, block),), BLOCK=block, num_warps=NUM_WARPS, enable_fp_fusion=True)

    return bound


def differentiable(
    name: str,
    *,
    forward: Callable,
    backward: Callable,
    activation: Callable,
    activation_backward: Callable,
) -> Callable[[Tensor, Tensor], Tensor]:
    """Register the ops `name` and `name`_backward; returns (gate, up) -> out with gradients for both, all of one shape and dtype.

    forward, backward: the kernels (gate, up, out, N) and (d_out, gate, up, d_gate, d_up, N). For CPU tensors
    activation(gate, out=) and activation_backward(d_out, gate, grad_input=) stand for them.
    """
    forward_for, backward_for = _for_elements(forward), _for_elements(backward)

    def launch_forward(gate: Tensor, up: Tensor) -> Tensor:
        out = torch.empty_like(gate)
        if N := gate.numel():
            forward_for(machine(gate.device), N).launch(gate, up, out)
        return out

    def launch_backward(d_out: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        if N := gate.numel():
            backward_for(machine(gate.device), N).launch(d_out, gate, up, d_gate, d_up)
        return d_gate, d_up

    def cpu_forward(gate: Tensor, up: Tensor) -> Tensor:
        result = torch.empty_like(gate)
        gate, up, out = gate.view(-1), up.view(-1), result.view(-1)
        for cut in pieces(out.numel()):
            activation(gate[cut], out=out[cut]).mul_(up[cut])
        return result

    def cpu_backward(d_out: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        results = torch.empty_like(gate), torch.empty_like(up)
        d_out, gate, up, d_gate, d_up = (x.view(-1) for x in (d_out, gate, up, *results))
        for cut in pieces(d_out.numel()):
            activation(gate[cut], out=d_up[cut]).mul_(d_out[cut])
            torch.mul(d_out[cut], up[cut], out=d_gate[cut])
            activation_backward(d_gate[cut], gate[cut], grad_input=d_gate[cut])
        return results

    run_forward = register(
        f"{name}(Tensor gate, Tensor up) -> Tensor",
        triton=launch_forward,
        cpu=cpu_forward,
        fake=lambda gate, up: torch.empty_like(gate),
    )
    run_backward = register(
        f"{name}_backward(Tensor d_out, Tensor gate, Tensor up) -> (Tensor, Tensor)",
        triton=launch_backward,
        cpu=cpu_backward,
        fake=lambda d_out, gate, up: (torch.empty_like(gate), torch.empty_like(up)),
    )

    class Gated(OnceFunction):
        @staticmethod
        def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
            ctx.save_for_backward(gate, up)
            return run_forward(gate, up)

        @staticmethod
        def backward(ctx, d_out: Tensor) -> tuple[Tensor, Tensor]:
            return run_backward(d_out.contiguous(), *ctx.saved_tensors)

    def run(gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        return run_forward(gate, up) if is_plain() else Gated.apply(gate, up)

    return run


def check_inputs(op: str, *, gate: Tensor, up: Tensor) -> None:
    """Raise ValueError unless gate and up match in shape and dtype."""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"{op}: gate {tuple(gate.shape)} {gate.dtype} and up {tuple(up.shape)} {up.dtype} must match in shape and dtype"
        )


def make_inputs(shape: tuple[int, ...], *, dtype: torch.dtype, device: str) -> dict[str, object]:
    """Random gate and up."""
    return {name: torch.randn(shape, dtype=dtype, device=device) for name in ("gate", "up")}
