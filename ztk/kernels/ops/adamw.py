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
from ztk.kernels.shared import flat
from ztk.kernels.shared.adam import adam_cpu, adam_reference, adam_tile


@jit
def _adamw(
    master_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, control_ptr, out_ptr, tiles_ptr, N,
    DECOUPLED: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of the module docstring's update"""
    adam_tile(
        master_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, control_ptr, out_ptr, tiles_ptr, N, 0, 0, DECOUPLED, PROGRAMS, BLOCK
    )  # fmt: skip


_op = flat.register(
    "adamw(Tensor(a!) master, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor control, Tensor(d!)? out, "
    "bool decoupled, Tensor? tiles) -> ()",
    kernel=_adamw,
    update=adam_cpu,
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
        exp_avg: float32 [n].
        exp_avg_sq: float32 [n].
        grad: float32, bfloat16 or float16 [n], left as it is.
        control: one row float32 [16] written by `step_control`.
        out: optional 16-bit [n] that receives the rounded master.
        decoupled: weight decay on the master (AdamW), not added to the gradient (Adam).
        tiles: made by `tiles_of` for this n, for parts with separate hyperparameters: one launch for all. `control` is then float32
            [rows, 16], which the tiles index; elements outside of all tiles do not change.

    Raises:
        ValueError: a tensor of another shape, dtype or device, or not contiguous.
    """
    states = {
        "exp_avg": (exp_avg, flat.FLOAT32),
        "exp_avg_sq": (exp_avg_sq, flat.FLOAT32),
        "out": (out, flat.GRAD_DTYPES),
    }
    tensors = {"master": (master, flat.FLOAT32), "grad": (grad, flat.GRAD_DTYPES)} | states
    flat.check("adamw", tensors=tensors, control=control, tiles=tiles)
    flat.dispatch(
        _op, reference=adam_reference, master=master, grad=grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, control=control,
        out=out, decoupled=decoupled, tiles=tiles,
    )  # fmt: skip


_STATES = {"master": torch.clone, "exp_avg": lambda x: x * 0.1, "exp_avg_sq": lambda x: x.square() * 0.01}

SPEC = flat.spec(
    "adamw",
    op=adamw,
    reference=adam_reference,
    make_inputs=functools.partial(flat.make_inputs, states=_STATES, with_out=True),
    mutated=("master", "exp_avg", "exp_avg_sq", "out"),
    bench_shapes=((1 << 24,), (1 << 28,), (1_000_000_000,)),
    variants=({}, {"with_out": False}, {"decoupled": False}, {"skip": True}, {"eps": 0.1}, {"segments": True}),
    traffic=lambda itemsize: 24 + 2 * itemsize,
    flops=15,
)
