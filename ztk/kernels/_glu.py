"""What `swiglu` and `geglu` share: both multiply an activation of one tensor with another, elementwise."""

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from ztk.kernels._library import WARP_SIZE
from ztk.kernels._spec import AotCase

NUM_WARPS = 4
BLOCK = 8 * WARP_SIZE * NUM_WARPS  # eight 16-bit elements per thread: one 16-byte access per tensor


def launch_forward(kernel: Callable, *, gate: Tensor, up: Tensor) -> Tensor:
    """out from `kernel(gate, up, out, N)`."""
    out = torch.empty_like(gate)
    N = gate.numel()
    if N:
        kernel[(triton.cdiv(N, BLOCK),)](gate, up, out, N, BLOCK=BLOCK, num_warps=NUM_WARPS, enable_fp_fusion=True)
    return out


def launch_backward(kernel: Callable, *, d_out: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """(d_gate, d_up) from `kernel(d_out, gate, up, d_gate, d_up, N)`."""
    d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
    N = gate.numel()
    if N:
        kernel[(triton.cdiv(N, BLOCK),)](
            d_out, gate, up, d_gate, d_up, N, BLOCK=BLOCK, num_warps=NUM_WARPS, enable_fp_fusion=True
        )
    return d_gate, d_up


def check_inputs(op: str, gate: Tensor, *, up: Tensor) -> None:
    """Raise ValueError unless gate and up match."""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"{op}: gate {tuple(gate.shape)} {gate.dtype} and up {tuple(up.shape)} {up.dtype} must match in shape and dtype"
        )


def make_inputs(shape: tuple[int, ...], *, dtype: torch.dtype, device: str) -> dict[str, object]:
    """Random gate and up."""
    return {name: torch.randn(shape, dtype=dtype, device=device) for name in ("gate", "up")}


def aot_case(kernel: Callable, *, max_registers: int, max_instructions_per_element: float) -> AotCase:
    """bfloat16 tensors of a padded length."""
    pointers = tuple(name for name in kernel.arg_names if name.endswith("_ptr"))
    return AotCase(
        kernel=kernel,
        signature=dict.fromkeys(pointers, "*bf16") | {"N": "i64"},
        constexprs={"BLOCK": 8 * 32 * NUM_WARPS},
        hip_constexprs={"BLOCK": 8 * 64 * NUM_WARPS},
        divisible_by_16=(*pointers, "N"),
        max_registers=max_registers,
        max_barriers=0,
        elements_per_program=8 * 32 * NUM_WARPS,
        max_instructions_per_element=max_instructions_per_element,
    )
