"""AdamW on a flat partition with bfloat16 moments and a float32 master: the update of `adamw` in 20 bytes a parameter.

The moments are computed in float32 and rounded on store: exp_avg to nearest, exp_avg_sq stochastically. With beta2 =
0.999 a step changes exp_avg_sq by a thousandth, less than half a bfloat16 step, so rounded to nearest it would never
decay; exp_avg moves by a tenth. Reads 10 and writes 10 bytes per parameter with a 16-bit gradient and `out`; keeps 8
and the 16-bit parameter. Random bits: `_rounding`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ztk.kernels._control import BETA1, BETA2, BIAS1, BIAS2, COEFFICIENT, EPS, LR, SKIP, STEP, WEIGHT_DECAY, Control
from ztk.kernels._cpu import PIECE
from ztk.kernels._flat import check_flat, control_row
from ztk.kernels._library import WARP_SIZE, register, use_reference
from ztk.kernels._math import cast
from ztk.kernels._rounding import (
    random_bits,
    random_bits_cpu,
    round_stochastic_bf16,
    round_stochastic_bf16_cpu,
)
from ztk.kernels._spec import AotCase, OpSpec, compute_dtype
from ztk.kernels.adamw import _cpu as adamw_cpu

NUM_WARPS = 4
BLOCK = 4 * WARP_SIZE * NUM_WARPS  # four per thread: see adamw


@triton.jit
def update_moments(control_ptr, b_p, b_g, b_m, b_v):
    """(p, m, v) after one decoupled AdamW step in float32, with the gradient as stored."""
    lr = tl.load(control_ptr + LR)
    beta1 = tl.load(control_ptr + BETA1)
    beta2 = tl.load(control_ptr + BETA2)
    step_size = lr / tl.load(control_ptr + BIAS1)
    inverse_bias2 = 1.0 / tl.load(control_ptr + BIAS2)
    b_g = b_g * tl.load(control_ptr + COEFFICIENT)
    b_p = b_p * (1.0 - lr * tl.load(control_ptr + WEIGHT_DECAY))
    b_m = b_m + (1.0 - beta1) * (b_g - b_m)
    b_v = beta2 * b_v + (1.0 - beta2) * b_g * b_g
    b_p = b_p - step_size * (b_m / (tl.sqrt(b_v) * inverse_bias2 + tl.load(control_ptr + EPS)))
    return b_p, b_m, b_v


@triton.jit(do_not_specialize=["seed", "start"])
def _adamw_bf16(
    master_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, control_ptr, out_ptr, N, seed, start,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of the AdamW update, moments rounded on store"""
    if tl.load(control_ptr + SKIP) == 0.0:
        o_n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        m_n = o_n < N
        b_p = tl.load(master_ptr + o_n, mask=m_n, other=0.0)
        b_g = tl.load(grad_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_m = tl.load(exp_avg_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_v = tl.load(exp_avg_sq_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_p, b_m, b_v = update_moments(control_ptr, b_p, b_g, b_m, b_v)
        b_random = random_bits(start + o_n, tl.load(control_ptr + STEP), seed)
        tl.store(master_ptr + o_n, b_p, mask=m_n)
        tl.store(exp_avg_ptr + o_n, cast(b_m, exp_avg_ptr.dtype.element_ty), mask=m_n)
        tl.store(exp_avg_sq_ptr + o_n, round_stochastic_bf16(b_v, b_random), mask=m_n)
        if out_ptr is not None:
            tl.store(out_ptr + o_n, cast(b_p, out_ptr.dtype.element_ty), mask=m_n)


def _launch(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    control: Tensor,
    out: Tensor | None,
    seed: int,
    start: int,
) -> None:
    N = master.numel()
    if N:
        _adamw_bf16[(triton.cdiv(N, BLOCK),)](
            master, grad, exp_avg, exp_avg_sq, control, out, N, seed, start,
            BLOCK=BLOCK, num_warps=NUM_WARPS, enable_fp_fusion=True,
        )  # fmt: skip


def updated(p: Tensor, *, g: Tensor, m: Tensor, v: Tensor, control: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(p, m, v) after one decoupled AdamW step, in control's dtype; `g` is the gradient as stored."""
    c = control
    g = g * c[Control.grad_coefficient]
    m = m + (1 - c[Control.beta1]) * (g - m)
    v = c[Control.beta2] * v + (1 - c[Control.beta2]) * g * g
    p = p * (1 - c[Control.lr] * c[Control.weight_decay])
    denominator = v.sqrt() * (1 / c[Control.bias_correction2_sqrt]) + c[Control.eps]
    return p - (c[Control.lr] / c[Control.bias_correction1]) * (m / denominator), m, v


def _cpu(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    control: Tensor,
    out: Tensor | None,
    seed: int,
    start: int,
) -> None:
    c = control.tolist()
    if c[Control.skip]:
        return
    for first in range(0, master.numel(), PIECE):
        cut = slice(first, first + PIECE)
        p, m, v = master[cut], exp_avg[cut].float(), exp_avg_sq[cut].float()
        adamw_cpu(p, grad[cut], m, v, control, None, True)
        random = random_bits_cpu(start=start + first, count=p.numel(), step=int(c[Control.step]), seed=seed)
        exp_avg[cut].copy_(m)
        exp_avg_sq[cut].copy_(round_stochastic_bf16_cpu(v, random))
        if out is not None:
            out[cut].copy_(p)


_op = register(
    "adamw_bf16(Tensor(a!) master, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor control, "
    "Tensor(d!)? out, int seed, int start) -> ()",
    triton=_launch,
    cpu=_cpu,
    fake=lambda master, grad, exp_avg, exp_avg_sq, control, out, seed, start: None,
)


def adamw_bf16(
    master: Tensor,
    *,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    control: Tensor,
    out: Tensor | None = None,
    seed: int = 0,
    start: int = 0,
) -> None:
    """One AdamW step in place with bfloat16 moments.

    master: float32 [n]; exp_avg, exp_avg_sq: bfloat16 [n]; grad: float32, bfloat16 or float16 [n]; control: one row
    float32 [16] of `step_control`; out: optional 16-bit [n] that receives the rounded master. n is a multiple of 16.
    `start` is the index of element 0 in the unpartitioned buffer: with it and `seed`, the result does not depend on how
    the buffer was cut. With control.skip nothing is written.
    """
    states = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    check_flat("adamw_bf16", master, grad=grad, states=states, control=control, out=out, state_dtypes=(torch.bfloat16,))
    run = _reference if use_reference() else _op
    run(master, grad, exp_avg, exp_avg_sq, control, out, seed, start)


def _reference(master, grad, exp_avg, exp_avg_sq, control, out, seed, start) -> None:
    adamw_bf16_reference(
        master, grad=grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, control=control, out=out, seed=seed, start=start
    )


def adamw_bf16_reference(
    master: Tensor,
    *,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    control: Tensor,
    out: Tensor | None = None,
    seed: int = 0,
    start: int = 0,
) -> None:
    """The same update, one plain operation at a time; float64 moments are not rounded."""
    c = control.to(compute_dtype(master))
    keep = c[Control.skip] != 0
    p, m, v = updated(master, g=grad.to(c.dtype), m=exp_avg.to(c.dtype), v=exp_avg_sq.to(c.dtype), control=c)
    if out is not None:
        out.copy_(torch.where(keep, out, p.to(out.dtype)))
    if exp_avg_sq.dtype == torch.bfloat16:
        random = random_bits_cpu(start=start, count=p.numel(), step=int(c[Control.step]), seed=seed)
        v = round_stochastic_bf16_cpu(v.cpu(), random).to(v.device)
    for old, new in ((master, p), (exp_avg, m), (exp_avg_sq, v)):
        old.copy_(torch.where(keep, old, new.to(old.dtype)))


def _make_inputs(shape, *, dtype, device, with_out=True, skip=False, start=0) -> dict[str, object]:
    (n,) = shape
    return {
        "master": torch.randn(n, device=device),
        "grad": torch.randn(n, device=device).to(dtype),
        "exp_avg": (torch.randn(n, device=device) * 0.1).bfloat16(),
        "exp_avg_sq": (torch.rand(n, device=device) * 0.01).bfloat16(),
        "control": control_row(skip=skip, device=device),
        "out": torch.zeros(n, dtype=torch.bfloat16, device=device) if with_out else None,
        "seed": 7,
        "start": start,
    }


_POINTERS = ("master_ptr", "grad_ptr", "exp_avg_ptr", "exp_avg_sq_ptr", "control_ptr", "out_ptr")

SPEC = OpSpec(
    name="adamw_bf16",
    op=adamw_bf16,
    reference=adamw_bf16_reference,
    make_inputs=_make_inputs,
    mutated=("master", "exp_avg", "exp_avg_sq", "out"),
    small_shapes=((16,), (528,), (2064,), (0,)),
    bench_shapes=((1 << 28,), (1_000_000_000,)),
    variants=({}, {"with_out": False, "start": (1 << 32) - 16}, {"skip": True}),
    num_bytes=lambda shape, itemsize: shape[0] * (16 + 2 * itemsize),
    num_flops=lambda shape: 15 * shape[0],
    aot=(
        AotCase(
            kernel=_adamw_bf16,
            variant="bf16 grad, out",
            signature=dict.fromkeys(_POINTERS, "*bf16")
            | {"master_ptr": "*fp32", "control_ptr": "*fp32", "N": "i64", "seed": "i64", "start": "i64"},
            constexprs={"BLOCK": 4 * 32 * NUM_WARPS},
            hip_constexprs={"BLOCK": 4 * 64 * NUM_WARPS},
            divisible_by_16=(*_POINTERS, "N"),
            num_warps=NUM_WARPS,
            max_registers=40,
            max_barriers=0,
            elements_per_program=4 * 32 * NUM_WARPS,
            max_instructions_per_element=80,
        ),
    ),
)
