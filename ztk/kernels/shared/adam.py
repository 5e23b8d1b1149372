"""The update that the AdamW ops share, on the device, on CPU tensors and in plain torch; formulas in `ops/adamw.py`.

`adam_tile`, `adam_cpu` and `adam_reference` are a template for ops that store parameters and moments in different dtypes; the last two are
these ops' CPU implementation and reference. Float32 tensors are not rounded. In bfloat16 exp_avg is rounded to nearest, parameters and
exp_avg_sq stochastically (`rounding`): parameters take the low half of an element's random bits and exp_avg_sq the high half, or the low
half where the parameters are float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ztk.kernels.shared import flat
from ztk.kernels.shared.control import (
    BETA1,
    BETA2,
    BIAS1,
    BIAS2,
    COEFFICIENT,
    EPS,
    LR,
    SKIP,
    STEP,
    WEIGHT_DECAY,
    Control,
)
from ztk.kernels.shared.cpu import PIECE, scaled_float32
from ztk.kernels.shared.math import cast
from ztk.kernels.shared.rounding import random_bits, random_bits_like, round_stochastic_bf16, round_stochastic_bf16_cpu
from ztk.kernels.shared.spec import compute_dtype
from ztk.kernels.shared.tiles import part_of
from ztk.kernels.shared.workers import in_parts


@triton.jit
def update(control_ptr, b_p, b_g, b_m, b_v, DECOUPLED: tl.constexpr):
    """(p, m, v) after one step in float32; b_g is the gradient as stored"""
    coefficient = tl.load(control_ptr + COEFFICIENT)
    lr = tl.load(control_ptr + LR)
    beta1 = tl.load(control_ptr + BETA1)
    beta2 = tl.load(control_ptr + BETA2)
    eps = tl.load(control_ptr + EPS)
    weight_decay = tl.load(control_ptr + WEIGHT_DECAY)
    step_size = lr / tl.load(control_ptr + BIAS1)
    inverse_bias2 = 1.0 / tl.load(control_ptr + BIAS2)
    b_g = b_g * coefficient
    if DECOUPLED:
        b_p = b_p * (1.0 - lr * weight_decay)
    else:
        b_g = b_g + weight_decay * b_p
    b_m = b_m + (1.0 - beta1) * (b_g - b_m)
    b_v = beta2 * b_v + (1.0 - beta2) * b_g * b_g
    b_p = b_p - step_size * (b_m / (tl.sqrt(b_v) * inverse_bias2 + eps))
    return b_p, b_m, b_v


@triton.jit
def adam_tile(
    param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, control_ptr, out_ptr, tiles_ptr, N, seed, start,
    DECOUPLED: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of the update, and the parameters rounded into `out`; a skipped step reads one number"""
    if tl.load(control_ptr + SKIP) == 0.0:
        first, stop, control_ptr, shift = part_of(tiles_ptr, control_ptr, N, start, PROGRAMS, BLOCK)
        o_n = first + tl.arange(0, BLOCK)
        m_n = o_n < stop
        b_p = tl.load(param_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_g = tl.load(grad_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_m = tl.load(exp_avg_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_v = tl.load(exp_avg_sq_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_p, b_m, b_v = update(control_ptr, b_p, b_g, b_m, b_v, DECOUPLED)
        if exp_avg_sq_ptr.dtype.element_ty == tl.bfloat16:
            b_random = random_bits(shift + o_n, tl.load(control_ptr + STEP), seed)
            if param_ptr.dtype.element_ty == tl.bfloat16:
                tl.store(param_ptr + o_n, round_stochastic_bf16(b_p, b_random), mask=m_n)
                b_random = b_random >> 16
            else:
                tl.store(param_ptr + o_n, b_p, mask=m_n)
            tl.store(exp_avg_ptr + o_n, cast(b_m, exp_avg_ptr.dtype.element_ty), mask=m_n)
            tl.store(exp_avg_sq_ptr + o_n, round_stochastic_bf16(b_v, b_random), mask=m_n)
        else:
            tl.store(param_ptr + o_n, b_p, mask=m_n)
            tl.store(exp_avg_ptr + o_n, b_m, mask=m_n)
            tl.store(exp_avg_sq_ptr + o_n, b_v, mask=m_n)
        if out_ptr is not None:
            tl.store(out_ptr + o_n, cast(b_p, out_ptr.dtype.element_ty), mask=m_n)


_NEVER = torch.tensor(1e30, device="cpu")  # a step count at which beta^step is 0, so torch's own bias corrections are 1


def update_cpu(
    p: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    *,
    control: list[float],
    out: Tensor | None = None,
    decoupled: bool = True,
) -> None:
    """p, m, v (float32 [n]) after one step, in place, and p rounded into `out`; grad as stored.

    torch's fused kernel works in 16-element units, so on partitions of full units it is a function of the element alone.
    Its bias corrections are folded into lr, eps and weight_decay instead of a step count.
    """
    c = control
    bias1, bias2 = c[Control.bias_correction1], c[Control.bias_correction2_sqrt]
    fused = torch._fused_adamw_ if decoupled else torch._fused_adam_
    hyper = {
        "lr": c[Control.lr] * bias2 / bias1,
        "beta1": c[Control.beta1],
        "beta2": c[Control.beta2],
        "eps": c[Control.eps] * bias2,
        "weight_decay": c[Control.weight_decay] * (bias1 / bias2 if decoupled else 1.0),
        "amsgrad": False,
        "maximize": False,
    }

    def part(cut: slice) -> None:
        g = scaled_float32(grad[cut], scale=c[Control.grad_coefficient])
        fused([p[cut]], [g], [m[cut]], [v[cut]], [], [_NEVER], **hyper)
        if out is not None:
            out[cut].copy_(p[cut])

    in_parts(p.numel(), part)


def adam_cpu(
    param: Tensor, /, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, control: list[float], out: Tensor | None = None,
    decoupled: bool = True, seed: int = 0, start: int = 0,
) -> None:  # fmt: skip
    """The template on CPU tensors, all [n]."""
    if exp_avg_sq.dtype == torch.float32:
        update_cpu(param, grad, exp_avg, exp_avg_sq, control=control, out=out, decoupled=decoupled)
        return

    def part(cut: slice) -> None:
        p, m, v = (x[cut].float() for x in (param, exp_avg, exp_avg_sq))  # of float32 parameters p is a view
        update_cpu(p, grad[cut], m, v, control=control, decoupled=decoupled)
        random = random_bits_like(p, start=start + cut.start, step=int(control[Control.step]), seed=seed)
        if param.dtype == torch.bfloat16:
            param[cut].copy_(round_stochastic_bf16_cpu(p, random))
            random = random >> 16
        exp_avg[cut].copy_(m)
        exp_avg_sq[cut].copy_(round_stochastic_bf16_cpu(v, random))
        if out is not None:
            out[cut].copy_(p)

    in_parts(param.numel(), part, longest=PIECE)


def updated(
    p: Tensor, *, g: Tensor, m: Tensor, v: Tensor, control: Tensor, decoupled: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """(p, m, v) after one step, one plain operation at a time in control's dtype; g is the gradient as stored.

    p, g, m, v and the results: one shape; control: [len(Control)].
    """
    c = control
    g = g * c[Control.grad_coefficient]
    if not decoupled:
        g = g + c[Control.weight_decay] * p
    m = m + (1 - c[Control.beta1]) * (g - m)
    v = c[Control.beta2] * v + (1 - c[Control.beta2]) * g * g
    p = p * (1 - c[Control.lr] * c[Control.weight_decay]) if decoupled else p
    denominator = v.sqrt() / c[Control.bias_correction2_sqrt] + c[Control.eps]
    return p - c[Control.lr] / c[Control.bias_correction1] * m / denominator, m, v


@flat.by_tiles
def adam_reference(
    param: Tensor, /, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, control: Tensor, out: Tensor | None = None,
    decoupled: bool = True, seed: int = 0, start: int = 0,
) -> None:  # fmt: skip
    """The template one plain operation at a time, all [n]; float64 tensors are not rounded."""
    c = control.to(compute_dtype(param))
    p, g, m, v = (x.to(c.dtype) for x in (param, grad, exp_avg, exp_avg_sq))
    p, m, v = updated(p, g=g, m=m, v=v, control=c, decoupled=decoupled)
    new_p, new_v = p, v
    if exp_avg_sq.dtype == torch.bfloat16:
        random = random_bits_like(p, start=start, step=int(c[Control.step]), seed=seed)
        if param.dtype == torch.bfloat16:
            new_p, random = round_stochastic_bf16_cpu(p, random), random >> 16
        new_v = round_stochastic_bf16_cpu(v, random)
    flat.write_unless_skipped(c, (out, p), (param, new_p), (exp_avg, m), (exp_avg_sq, new_v))
