"""Lion on a flat partition: unscale, clip, skip, update and the 16-bit copy in one pass.

    g       = grad * grad_coefficient
    master  = master * (1 - lr * weight_decay) - lr * sign(beta1 * exp_avg + (1 - beta1) * g)
    exp_avg = beta2 * exp_avg + (1 - beta2) * g
    out     = master, rounded

Reads 10 and writes 10 bytes per parameter with a 16-bit gradient and `out`.

Chen et al., https://arxiv.org/abs/2302.06675
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ztk.kernels._control import BETA1, BETA2, COEFFICIENT, LR, SKIP, WEIGHT_DECAY, Control
from ztk.kernels._cpu import UPDATE_PIECE, scaled_float32, scratch
from ztk.kernels._flat import check_flat, control_row
from ztk.kernels._library import WARP_SIZE, register, use_reference
from ztk.kernels._math import cast
from ztk.kernels._spec import AotCase, OpSpec, compute_dtype

NUM_WARPS = 4
BLOCK = 4 * WARP_SIZE * NUM_WARPS  # four elements per thread: see adamw.py


@triton.jit
def _lion(master_ptr, grad_ptr, exp_avg_ptr, control_ptr, out_ptr, N, HAS_OUT: tl.constexpr, BLOCK: tl.constexpr):
    """One tile of the module docstring's update"""
    if tl.load(control_ptr + SKIP) == 0.0:
        i_n = tl.program_id(0).to(tl.int64)
        o_n = i_n * BLOCK + tl.arange(0, BLOCK)
        m_n = o_n < N
        coefficient = tl.load(control_ptr + COEFFICIENT)
        lr = tl.load(control_ptr + LR)
        beta1 = tl.load(control_ptr + BETA1)
        beta2 = tl.load(control_ptr + BETA2)
        weight_decay = tl.load(control_ptr + WEIGHT_DECAY)

        b_p = tl.load(master_ptr + o_n, mask=m_n, other=0.0)
        b_g = tl.load(grad_ptr + o_n, mask=m_n, other=0.0).to(tl.float32) * coefficient
        b_m = tl.load(exp_avg_ptr + o_n, mask=m_n, other=0.0)
        b_direction = beta1 * b_m + (1.0 - beta1) * b_g
        b_sign = tl.where(b_direction > 0.0, 1.0, tl.where(b_direction < 0.0, -1.0, 0.0))
        b_p = b_p * (1.0 - lr * weight_decay) - lr * b_sign
        b_m = beta2 * b_m + (1.0 - beta2) * b_g

        tl.store(master_ptr + o_n, b_p, mask=m_n)
        tl.store(exp_avg_ptr + o_n, b_m, mask=m_n)
        if HAS_OUT:
            tl.store(out_ptr + o_n, cast(b_p, out_ptr.dtype.element_ty), mask=m_n)


def _launch(master: Tensor, grad: Tensor, exp_avg: Tensor, control: Tensor, out: Tensor | None) -> None:
    N = master.numel()
    if N:
        _lion[(triton.cdiv(N, BLOCK),)](
            master, grad, exp_avg, control, master if out is None else out, N,
            HAS_OUT=out is not None, BLOCK=BLOCK, num_warps=NUM_WARPS, enable_fp_fusion=True,
        )  # fmt: skip


def _cpu(master: Tensor, grad: Tensor, exp_avg: Tensor, control: Tensor, out: Tensor | None) -> None:
    # Only operations that round once (mul, add, sub, sign): torch runs tails and thread borders through scalar code, which
    # may contract a multiply-add differently from the vector code, and an element's bits must not depend on its place.
    c = control.tolist()
    if c[Control.skip]:
        return
    beta1, beta2, lr = c[Control.beta1], c[Control.beta2], c[Control.lr]
    for start in range(0, master.numel(), UPDATE_PIECE):
        cut = slice(start, start + UPDATE_PIECE)
        p, m = master[cut], exp_avg[cut]
        g = scaled_float32(grad[cut], scale=c[Control.grad_coefficient], slot=0)
        direction, scaled_g = scratch(p.numel(), slot=1), scratch(p.numel(), slot=2)
        torch.mul(m, beta1, out=direction)
        torch.mul(g, 1.0 - beta1, out=scaled_g)
        direction.add_(scaled_g).sign_().mul_(lr)
        p.mul_(1.0 - lr * c[Control.weight_decay]).sub_(direction)
        torch.mul(g, 1.0 - beta2, out=scaled_g)
        m.mul_(beta2).add_(scaled_g)
        if out is not None:
            out[cut].copy_(p)


_op = register(
    "lion(Tensor(a!) master, Tensor grad, Tensor(b!) exp_avg, Tensor control, Tensor(c!)? out) -> ()",
    triton=_launch,
    cpu=_cpu,
    fake=lambda master, grad, exp_avg, control, out: None,
)


def lion(master: Tensor, *, grad: Tensor, exp_avg: Tensor, control: Tensor, out: Tensor | None = None) -> None:
    """One Lion step in place.

    Shapes, dtypes, skipping and the independence of an element from its place are those of `adamw`.
    """
    check_flat("lion", master, grad=grad, states={"exp_avg": exp_avg}, control=control, out=out)
    if use_reference():
        lion_reference(master, grad=grad, exp_avg=exp_avg, control=control, out=out)
    else:
        _op(master, grad, exp_avg, control, out)


def lion_reference(
    master: Tensor, *, grad: Tensor, exp_avg: Tensor, control: Tensor, out: Tensor | None = None
) -> None:
    """The same update, one plain operation at a time."""
    c = control.to(compute_dtype(master))
    keep = c[Control.skip] != 0
    g = grad.to(c.dtype) * c[Control.grad_coefficient]
    sign = (c[Control.beta1] * exp_avg + (1 - c[Control.beta1]) * g).sign()
    p = master * (1 - c[Control.lr] * c[Control.weight_decay]) - c[Control.lr] * sign
    m = c[Control.beta2] * exp_avg + (1 - c[Control.beta2]) * g
    if out is not None:
        out.copy_(torch.where(keep, out, p.to(out.dtype)))
    master.copy_(torch.where(keep, master, p))
    exp_avg.copy_(torch.where(keep, exp_avg, m))


def _make_inputs(
    shape: tuple[int, ...], *, dtype: torch.dtype, device: str, with_out: bool = True, skip: bool = False
) -> dict[str, object]:
    (n,) = shape
    return {
        "master": torch.randn(n, device=device),
        "grad": torch.randn(n, device=device).to(dtype),
        "exp_avg": torch.randn(n, device=device),
        "control": control_row(skip=skip, device=device),
        "out": torch.zeros(n, dtype=torch.bfloat16 if dtype == torch.float32 else dtype, device=device)
        if with_out
        else None,
    }


_POINTERS = ("master_ptr", "grad_ptr", "exp_avg_ptr", "control_ptr", "out_ptr")

SPEC = OpSpec(
    name="lion",
    op=lion,
    reference=lion_reference,
    make_inputs=_make_inputs,
    mutated=("master", "exp_avg", "out"),
    small_shapes=((16,), (528,), (0,)),
    bench_shapes=((1 << 28,),),
    variants=({}, {"with_out": False}, {"skip": True}),
    num_bytes=lambda shape, itemsize: shape[0] * (16 + 2 * itemsize),
    num_flops=lambda shape: 8 * shape[0],
    aot=(
        AotCase(
            kernel=_lion,
            signature=dict.fromkeys(_POINTERS, "*fp32") | {"grad_ptr": "*bf16", "out_ptr": "*bf16", "N": "i64"},
            constexprs={"HAS_OUT": True, "BLOCK": 4 * 32 * NUM_WARPS},
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
