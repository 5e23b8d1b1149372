"""SGD with momentum on a flat partition: unscale, clip, skip, update and the 16-bit copy in one pass.

    g               = grad * grad_coefficient + weight_decay * master
    momentum_buffer = momentum * momentum_buffer + g
    master          = master - lr * (g + momentum * momentum_buffer   if nesterov else   momentum_buffer)
    out             = master, rounded

Reads 10 and writes 10 bytes per parameter with a 16-bit gradient and `out` (6 and 6 without a momentum buffer). The
momentum buffer starts at zero, so the first step needs no case of its own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ztk.kernels._control import COEFFICIENT, LR, MOMENTUM, SKIP, WEIGHT_DECAY, Control
from ztk.kernels._cpu import UPDATE_PIECE, scaled_float32
from ztk.kernels._flat import check_flat, control_row
from ztk.kernels._library import WARP_SIZE, register, use_reference
from ztk.kernels._math import cast
from ztk.kernels._spec import AotCase, OpSpec, compute_dtype

NUM_WARPS = 4
BLOCK = 4 * WARP_SIZE * NUM_WARPS  # four elements per thread: see adamw.py


@triton.jit
def _sgd(
    master_ptr, grad_ptr, momentum_ptr, control_ptr, out_ptr, N,
    HAS_MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, HAS_OUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of the module docstring's update"""
    if tl.load(control_ptr + SKIP) == 0.0:
        i_n = tl.program_id(0).to(tl.int64)
        o_n = i_n * BLOCK + tl.arange(0, BLOCK)
        m_n = o_n < N
        coefficient = tl.load(control_ptr + COEFFICIENT)
        lr = tl.load(control_ptr + LR)
        weight_decay = tl.load(control_ptr + WEIGHT_DECAY)
        momentum = tl.load(control_ptr + MOMENTUM)

        b_p = tl.load(master_ptr + o_n, mask=m_n, other=0.0)
        b_g = tl.load(grad_ptr + o_n, mask=m_n, other=0.0).to(tl.float32) * coefficient + weight_decay * b_p
        if HAS_MOMENTUM:
            b_buffer = momentum * tl.load(momentum_ptr + o_n, mask=m_n, other=0.0) + b_g
            tl.store(momentum_ptr + o_n, b_buffer, mask=m_n)
            if NESTEROV:
                b_g = b_g + momentum * b_buffer
            else:
                b_g = b_buffer
        b_p = b_p - lr * b_g
        tl.store(master_ptr + o_n, b_p, mask=m_n)
        if HAS_OUT:
            tl.store(out_ptr + o_n, cast(b_p, out_ptr.dtype.element_ty), mask=m_n)


def _launch(
    master: Tensor, grad: Tensor, momentum_buffer: Tensor | None, control: Tensor, out: Tensor | None, nesterov: bool
) -> None:
    N = master.numel()
    if N:
        _sgd[(triton.cdiv(N, BLOCK),)](
            master, grad, master if momentum_buffer is None else momentum_buffer, control, master if out is None else out,
            N, HAS_MOMENTUM=momentum_buffer is not None, NESTEROV=nesterov, HAS_OUT=out is not None, BLOCK=BLOCK,
            num_warps=NUM_WARPS, enable_fp_fusion=True,
        )  # fmt: skip


def _cpu(
    master: Tensor, grad: Tensor, momentum_buffer: Tensor | None, control: Tensor, out: Tensor | None, nesterov: bool
) -> None:
    # Whole 16-element units through torch's fused kernel: a function of the element alone, as in adamw.
    c = control.tolist()
    if c[Control.skip]:
        return
    momentum = 0.0 if momentum_buffer is None else c[Control.momentum]  # 0 in one group among others that have some
    for start in range(0, master.numel(), UPDATE_PIECE):
        cut = slice(start, start + UPDATE_PIECE)
        p = master[cut]
        g = scaled_float32(grad[cut], scale=c[Control.grad_coefficient])
        torch._fused_sgd_(
            [p],
            [g],
            [momentum_buffer[cut]] if momentum else [],
            weight_decay=c[Control.weight_decay],
            momentum=momentum,
            lr=c[Control.lr],
            dampening=0.0,
            nesterov=nesterov and momentum > 0.0,
            maximize=False,
            is_first_step=False,
        )
        if out is not None:
            out[cut].copy_(p)


_op = register(
    "sgd(Tensor(a!) master, Tensor grad, Tensor(b!)? momentum_buffer, Tensor control, Tensor(c!)? out, bool nesterov) -> ()",
    triton=_launch,
    cpu=_cpu,
    fake=lambda master, grad, momentum_buffer, control, out, nesterov: None,
)


def sgd(
    master: Tensor,
    *,
    grad: Tensor,
    momentum_buffer: Tensor | None = None,
    control: Tensor,
    out: Tensor | None = None,
    nesterov: bool = False,
) -> None:
    """One SGD step in place, with momentum when `momentum_buffer` is given.

    Shapes, dtypes, skipping and the independence of an element from its place are those of `adamw`.
    """
    check_flat("sgd", master, grad=grad, states={"momentum_buffer": momentum_buffer}, control=control, out=out)
    if nesterov and momentum_buffer is None:
        raise ValueError("sgd: nesterov=True needs a momentum_buffer; pass one, or nesterov=False")
    if use_reference():
        sgd_reference(master, grad=grad, momentum_buffer=momentum_buffer, control=control, out=out, nesterov=nesterov)
    else:
        _op(master, grad, momentum_buffer, control, out, nesterov)


def sgd_reference(
    master: Tensor,
    *,
    grad: Tensor,
    momentum_buffer: Tensor | None = None,
    control: Tensor,
    out: Tensor | None = None,
    nesterov: bool = False,
) -> None:
    """The same update, one plain operation at a time."""
    c = control.to(compute_dtype(master))
    keep = c[Control.skip] != 0
    update = grad.to(c.dtype) * c[Control.grad_coefficient] + c[Control.weight_decay] * master
    if momentum_buffer is not None:
        buffer = c[Control.momentum] * momentum_buffer + update
        update = update + c[Control.momentum] * buffer if nesterov else buffer
        momentum_buffer.copy_(torch.where(keep, momentum_buffer, buffer))
    p = master - c[Control.lr] * update
    if out is not None:
        out.copy_(torch.where(keep, out, p.to(out.dtype)))
    master.copy_(torch.where(keep, master, p))


def _make_inputs(
    shape: tuple[int, ...],
    *,
    dtype: torch.dtype,
    device: str,
    momentum: bool = True,
    nesterov: bool = False,
    with_out: bool = True,
    skip: bool = False,
) -> dict[str, object]:
    (n,) = shape
    return {
        "master": torch.randn(n, device=device),
        "grad": torch.randn(n, device=device).to(dtype),
        "momentum_buffer": torch.randn(n, device=device) if momentum else None,
        "control": control_row(skip=skip, device=device),
        "out": torch.zeros(n, dtype=torch.bfloat16 if dtype == torch.float32 else dtype, device=device)
        if with_out
        else None,
        "nesterov": nesterov,
    }


_POINTERS = ("master_ptr", "grad_ptr", "momentum_ptr", "control_ptr", "out_ptr")

SPEC = OpSpec(
    name="sgd",
    op=sgd,
    reference=sgd_reference,
    make_inputs=_make_inputs,
    mutated=("master", "momentum_buffer", "out"),
    small_shapes=((16,), (528,), (0,)),
    bench_shapes=((1 << 28,),),
    variants=({}, {"momentum": False}, {"nesterov": True, "with_out": False}, {"skip": True}),
    num_bytes=lambda shape, itemsize: shape[0] * (16 + 2 * itemsize),
    num_flops=lambda shape: 6 * shape[0],
    aot=(
        AotCase(
            kernel=_sgd,
            signature=dict.fromkeys(_POINTERS, "*fp32") | {"grad_ptr": "*bf16", "out_ptr": "*bf16", "N": "i64"},
            constexprs={"HAS_MOMENTUM": True, "NESTEROV": False, "HAS_OUT": True, "BLOCK": 4 * 32 * NUM_WARPS},
            hip_constexprs={"BLOCK": 4 * 64 * NUM_WARPS},
            divisible_by_16=(*_POINTERS, "N"),
            num_warps=NUM_WARPS,
            max_registers=40,
            max_barriers=0,
            elements_per_program=4 * 32 * NUM_WARPS,
            max_instructions_per_element=40,
        ),
    ),
)
