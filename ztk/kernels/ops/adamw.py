"""Adam and AdamW on a flat partition: unscale, clip, skip, update and the 16-bit copy in one pass.

    g          = grad * grad_coefficient                    (+ weight_decay * master when not decoupled)
    exp_avg    = exp_avg + (1 - beta1) * (g - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g^2
    master     = master * (1 - lr * weight_decay) - lr / bias_correction1 * exp_avg / (sqrt(exp_avg_sq) / bias_correction2_sqrt + eps)
    out        = master, rounded

Reads 14 and writes 14 bytes per parameter with a 16-bit gradient and a 16-bit `out`; a step with control.skip reads one
scalar. See [Note: Four per thread] in `shared.flat`.

Kingma and Ba, https://arxiv.org/abs/1412.6980; Loshchilov and Hutter, https://arxiv.org/abs/1711.05101
"""

import functools

import torch
import triton.language as tl
from torch import Tensor

from ztk.kernels.launch.jit import jit
from ztk.kernels.shared.adam import update, update_cpu, updated
from ztk.kernels.shared.control import SKIP
from ztk.kernels.shared.flat import (
    FLOAT32,
    GRAD_DTYPES,
    check_flat,
    dispatch,
    flat_launches,
    flat_spec,
    launch_flat,
    make_flat_inputs,
    register_update,
    write_unless_skipped,
)
from ztk.kernels.shared.math import cast
from ztk.kernels.shared.spec import compute_dtype
from ztk.kernels.shared.tiles import each_tile, part_of


@jit
def _adamw(
    master_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, control_ptr, out_ptr, tiles_ptr, N,
    DECOUPLED: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of the module docstring's update"""
    if tl.load(control_ptr + SKIP) == 0.0:
        first, stop, control_ptr, _ = part_of(tiles_ptr, control_ptr, N, 0, PROGRAMS, BLOCK)
        o_n = first + tl.arange(0, BLOCK)
        m_n = o_n < stop
        b_p = tl.load(master_ptr + o_n, mask=m_n, other=0.0)
        b_g = tl.load(grad_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_m = tl.load(exp_avg_ptr + o_n, mask=m_n, other=0.0)
        b_v = tl.load(exp_avg_sq_ptr + o_n, mask=m_n, other=0.0)
        b_p, b_m, b_v = update(control_ptr, b_p, b_g, b_m, b_v, DECOUPLED)
        tl.store(master_ptr + o_n, b_p, mask=m_n)
        tl.store(exp_avg_ptr + o_n, b_m, mask=m_n)
        tl.store(exp_avg_sq_ptr + o_n, b_v, mask=m_n)
        if out_ptr is not None:
            tl.store(out_ptr + o_n, cast(b_p, out_ptr.dtype.element_ty), mask=m_n)


_launches = flat_launches(_adamw, "DECOUPLED")


def _launch(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    control: Tensor,
    out: Tensor | None,
    decoupled: bool,
    tiles: Tensor | None,
) -> None:
    launch_flat(_launches, master, grad, exp_avg, exp_avg_sq, control, out, tiles=tiles, constexprs=(decoupled,))


def _cpu(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    control: list,
    out: Tensor | None,
    decoupled: bool,
) -> None:
    update_cpu(master, grad, exp_avg, exp_avg_sq, control=control, out=out, decoupled=decoupled)


_op = register_update(
    "adamw(Tensor(a!) master, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor control, Tensor(d!)? out, "
    "bool decoupled, Tensor? tiles) -> ()",
    launch=_launch,
    update=_cpu,
)


def adamw(
    master: Tensor,
    *,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    control: Tensor,
    out: Tensor | None = None,
    decoupled: bool = True,
    tiles: Tensor | None = None,
) -> None:
    """One AdamW step in place (Adam with L2 regularisation when `decoupled` is False).

    The result for an element depends on that element and `control` alone, so any partition of a buffer into multiples of 16
    gives the same bits as the full buffer. With control.skip nothing is written.

    Args:
        master: float32 [n], n a multiple of 16.
        exp_avg: as `master`.
        exp_avg_sq: as `master`.
        grad: float32, bfloat16 or float16 [n], left as it is.
        control: one row float32 [16] written by `step_control`.
        out: optional 16-bit [n] that receives the rounded master.
        decoupled: weight decay on the master (AdamW), not added to the gradient (Adam).
        tiles: of `tiles_of` for this n, where parts have hyperparameters of their own: one launch for all. `control` is then float32
            [rows, 16], of which the tiles name theirs; elements of no tile stay as they are.

    Raises:
        ValueError: a tensor of another shape, dtype or device, or not contiguous.
    """
    states = {"exp_avg": (exp_avg, FLOAT32), "exp_avg_sq": (exp_avg_sq, FLOAT32), "out": (out, GRAD_DTYPES)}
    tensors = {"master": (master, FLOAT32), "grad": (grad, GRAD_DTYPES)} | states
    check_flat("adamw", tensors=tensors, control=control, tiles=tiles)
    dispatch(
        _op, reference=adamw_reference, master=master, grad=grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, control=control,
        out=out, decoupled=decoupled, tiles=tiles,
    )  # fmt: skip


def adamw_reference(
    master: Tensor,
    *,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    control: Tensor,
    out: Tensor | None = None,
    decoupled: bool = True,
    tiles: Tensor | None = None,
) -> None:
    """The same update, one plain operation at a time."""
    if tiles is not None:
        states = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "out": out}
        for part in each_tile(tiles, master=master, grad=grad, **states, control=control, decoupled=decoupled):
            adamw_reference(**part)
        return
    c = control.to(compute_dtype(master))
    p, m, v = updated(master, g=grad.to(c.dtype), m=exp_avg, v=exp_avg_sq, control=c, decoupled=decoupled)
    write_unless_skipped(c, (out, p), (master, p), (exp_avg, m), (exp_avg_sq, v))


_STATES = {"master": torch.clone, "exp_avg": lambda x: x * 0.1, "exp_avg_sq": lambda x: x.square() * 0.01}


_make_inputs = functools.partial(make_flat_inputs, states=_STATES, with_out=True)


SPEC = flat_spec(
    "adamw",
    op=adamw,
    reference=adamw_reference,
    make_inputs=_make_inputs,
    mutated=("master", "exp_avg", "exp_avg_sq", "out"),
    bench_shapes=((1 << 24,), (1 << 28,), (1_000_000_000,)),
    variants=({}, {"with_out": False}, {"decoupled": False}, {"skip": True}, {"eps": 0.1}, {"segments": True}),
    traffic=lambda itemsize: 24 + 2 * itemsize,
    flops=15,
)
