"""AdamW on a flat partition with bfloat16 moments and a float32 master: the update of `adamw` in 20 bytes a parameter.

The moments are computed in float32 and rounded on store: exp_avg to nearest, exp_avg_sq stochastically. With beta2 =
0.999 a step changes exp_avg_sq by a thousandth, less than half a bfloat16 step, so rounded to nearest it would never
decay; exp_avg moves by a tenth. Reads 10 and writes 10 bytes per parameter with a 16-bit gradient and `out`; keeps 8
and the 16-bit parameter. Random bits: `shared.rounding`.
"""

import functools

import torch
import triton.language as tl
from torch import Tensor

from ztk.kernels.launch.jit import jit
from ztk.kernels.shared import flat
from ztk.kernels.shared.adam import adam_cpu, adam_reference, adam_tile


@jit(do_not_specialize=["seed", "start"])
def _adamw_bf16(
    master_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, control_ptr, out_ptr, tiles_ptr, N, seed, start,
    PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of the AdamW update, moments rounded on store"""
    adam_tile(
        master_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, control_ptr, out_ptr, tiles_ptr, N, seed, start, True, PROGRAMS, BLOCK
    )  # fmt: skip


_op = flat.register(
    "adamw_bf16(Tensor(a!) master, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor control, "
    "Tensor(d!)? out, int seed, int start, Tensor? tiles) -> ()",
    kernel=_adamw_bf16,
    update=adam_cpu,
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
    tiles: Tensor | None = None,
) -> None:
    """One AdamW step in place with bfloat16 moments. With control.skip nothing is written.

    Args:
        master: float32 [n], n a multiple of 16.
        exp_avg: bfloat16 [n].
        exp_avg_sq: the same as `exp_avg`.
        grad: float32, bfloat16 or float16 [n].
        control: one row float32 [16] of `step_control`.
        out: optional 16-bit [n] that receives the rounded master.
        seed: seeds the random bits.
        start: index of element 0 in the unpartitioned buffer: with it and `seed`, the result does not depend on how the
            buffer was cut.
        tiles: made by `tiles_of` for this n, for parts with separate hyperparameters and positions (instead of `start`): one launch
            for all. `control` is then float32 [rows, 16], which the tiles index; elements outside of all tiles do not change.

    Raises:
        ValueError: a tensor of another shape, dtype or device, or not contiguous.
    """
    states = {
        "exp_avg": (exp_avg, flat.BFLOAT16),
        "exp_avg_sq": (exp_avg_sq, flat.BFLOAT16),
        "out": (out, flat.GRAD_DTYPES),
    }
    tensors = {"master": (master, flat.FLOAT32), "grad": (grad, flat.GRAD_DTYPES)} | states
    flat.check("adamw_bf16", tensors=tensors, control=control, tiles=tiles)
    flat.dispatch(
        _op, reference=adam_reference, master=master, grad=grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq,
        control=control, out=out, seed=seed, start=start, tiles=tiles,
    )  # fmt: skip


_STATES = {
    "master": torch.clone,
    "exp_avg": lambda x: (x * 0.1).bfloat16(),
    "exp_avg_sq": lambda x: (x.square() * 0.01).bfloat16(),
}

SPEC = flat.spec(
    "adamw_bf16",
    op=adamw_bf16,
    reference=adam_reference,
    make_inputs=functools.partial(flat.make_inputs, states=_STATES, with_out=True, seed=7, start=0),
    mutated=("master", "exp_avg", "exp_avg_sq", "out"),
    variants=({}, {"with_out": False, "start": (1 << 32) - 16}, {"skip": True}, {"segments": True}),
    traffic=lambda itemsize: 16 + 2 * itemsize,
    flops=15,
)
