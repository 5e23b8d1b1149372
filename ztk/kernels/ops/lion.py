"""Lion on a flat partition: unscale, clip, skip, update and the 16-bit copy in one pass.

    g       = grad * grad_coefficient
    master  = master * (1 - lr * weight_decay) - lr * sign(beta1 * exp_avg + (1 - beta1) * g)
    exp_avg = beta2 * exp_avg + (1 - beta2) * g
    out     = master, rounded

Reads 10 and writes 10 bytes per parameter with a 16-bit gradient and `out`.

Chen et al., https://arxiv.org/abs/2302.06675
"""

import functools

import torch
import triton.language as tl
from torch import Tensor

from ztk.kernels.launch.jit import jit
from ztk.kernels.shared import flat
from ztk.kernels.shared.control import BETA1, BETA2, COEFFICIENT, LR, SKIP, WEIGHT_DECAY, Control
from ztk.kernels.shared.cpu import scaled_float32, scratch
from ztk.kernels.shared.math import cast
from ztk.kernels.shared.spec import compute_dtype
from ztk.kernels.shared.tiles import part_of
from ztk.kernels.shared.workers import in_parts


@jit
def _lion(
    master_ptr, grad_ptr, exp_avg_ptr, control_ptr, out_ptr, tiles_ptr, N, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One tile of the module docstring's update"""
    if tl.load(control_ptr + SKIP) == 0.0:
        first, stop, control_ptr, _ = part_of(tiles_ptr, control_ptr, N, 0, PROGRAMS, BLOCK)
        o_n = first + tl.arange(0, BLOCK)
        m_n = o_n < stop
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
        if out_ptr is not None:
            tl.store(out_ptr + o_n, cast(b_p, out_ptr.dtype.element_ty), mask=m_n)


def _cpu(master: Tensor, grad: Tensor, exp_avg: Tensor, control: list, out: Tensor | None) -> None:
    # Only operations that round once (mul, add, sub, sign): torch runs tails and thread borders through scalar code, which
    # may contract a multiply-add differently from the vector code, and an element's bits must not depend on its place.
    c = control
    beta1, beta2, lr = c[Control.beta1], c[Control.beta2], c[Control.lr]

    def part(cut: slice) -> None:
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

    in_parts(master.numel(), part)


_op = flat.register(
    "lion(Tensor(a!) master, Tensor grad, Tensor(b!) exp_avg, Tensor control, Tensor(c!)? out, Tensor? tiles) -> ()",
    kernel=_lion,
    update=_cpu,
)


def lion(
    master: Tensor,
    *,
    grad: Tensor,
    exp_avg: Tensor,
    control: Tensor,
    out: Tensor | None = None,
    tiles: Tensor | None = None,
) -> None:
    """One Lion step in place.

    Skipped steps, and the independence of results from an element's position, are as in `adamw`.

    Args:
        master: float32 [n], n a multiple of 16.
        exp_avg: float32 [n].
        grad: float32, bfloat16 or float16 [n].
        control: one row float32 [16] of `step_control`.
        out: optional 16-bit [n] that receives the rounded master.
        tiles: made by `tiles_of` for this n, for parts with separate hyperparameters: one launch for all. `control` is then float32
            [rows, 16], which the tiles index; elements outside of all tiles do not change.

    Raises:
        ValueError: a tensor of another shape, dtype or device, or not contiguous.
    """
    tensors = {"master": (master, flat.FLOAT32), "grad": (grad, flat.GRAD_DTYPES), "exp_avg": (exp_avg, flat.FLOAT32)}
    flat.check("lion", tensors=tensors | {"out": (out, flat.GRAD_DTYPES)}, control=control, tiles=tiles)
    flat.dispatch(
        _op, reference=_reference, master=master, grad=grad, exp_avg=exp_avg, control=control, out=out, tiles=tiles
    )


@flat.by_tiles
def _reference(master, grad, exp_avg, control, out=None) -> None:
    """The same update, one plain operation at a time."""
    c = control.to(compute_dtype(master))
    g = grad.to(c.dtype) * c[Control.grad_coefficient]
    sign = (c[Control.beta1] * exp_avg + (1 - c[Control.beta1]) * g).sign()
    p = master * (1 - c[Control.lr] * c[Control.weight_decay]) - c[Control.lr] * sign
    m = c[Control.beta2] * exp_avg + (1 - c[Control.beta2]) * g
    flat.write_unless_skipped(c, (out, p), (master, p), (exp_avg, m))


_make_inputs = functools.partial(
    flat.make_inputs, states={"master": torch.clone, "exp_avg": torch.clone}, with_out=True
)

SPEC = flat.spec(
    "lion",
    op=lion,
    reference=_reference,
    make_inputs=_make_inputs,
    mutated=("master", "exp_avg", "out"),
    bench_shapes=((1 << 28,),),
    variants=({}, {"with_out": False}, {"skip": True}, {"segments": True}),
    traffic=lambda itemsize: 16 + 2 * itemsize,
    flops=8,
)
