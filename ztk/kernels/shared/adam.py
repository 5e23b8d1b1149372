"""The update that all AdamW kernels share, on the device, on CPU tensors and in plain torch; formulas in `adamw`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ztk.kernels.shared.control import BETA1, BETA2, BIAS1, BIAS2, COEFFICIENT, EPS, LR, WEIGHT_DECAY, Control
from ztk.kernels.shared.cpu import UPDATE_PIECE, scaled_float32


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
    for start in range(0, p.numel(), UPDATE_PIECE):
        cut = slice(start, start + UPDATE_PIECE)
        g = scaled_float32(grad[cut], scale=c[Control.grad_coefficient])
        fused([p[cut]], [g], [m[cut]], [v[cut]], [], [_NEVER], **hyper)
        if out is not None:
            out[cut].copy_(p[cut])


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
