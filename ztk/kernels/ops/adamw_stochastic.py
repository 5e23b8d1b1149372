"""AdamW on bfloat16 parameters without a master copy: everything is 16 bits wide, the update is rounded stochastically.

A small update vanishes when a bfloat16 parameter is rounded to nearest, and with stochastic rounding survives in
expectation. Parameters take the low half of an element's random bits, exp_avg_sq the high half, exp_avg is rounded to
nearest (see `adamw_bf16`). Reads 8 and writes 6 bytes per parameter with a bfloat16 gradient; keeps 6.

Eight elements per thread: all tensors are 16 bits wide, so 16-byte accesses need no layout conversion. A float32
gradient takes four.
"""

import functools

import triton.language as tl
from torch import Tensor

from ztk.kernels.launch.jit import jit
from ztk.kernels.shared import flat
from ztk.kernels.shared.adam import adam_cpu, adam_reference, adam_tile


@jit(do_not_specialize=["seed", "start"])
def _adamw_stochastic(
    param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, control_ptr, tiles_ptr, N, seed, start,
    PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of the AdamW update, parameters and second moments rounded stochastically"""
    adam_tile(
        param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, control_ptr, None, tiles_ptr, N, seed, start, True, PROGRAMS, BLOCK
    )  # fmt: skip


_op = flat.register(
    "adamw_stochastic(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor control, "
    "int seed, int start, Tensor? tiles) -> ()",
    kernel=_adamw_stochastic,
    update=adam_cpu,
    per_thread=(8, 4),
)


def adamw_stochastic(
    param: Tensor,
    *,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    control: Tensor,
    seed: int = 0,
    start: int = 0,
    tiles: Tensor | None = None,
) -> None:
    """One AdamW step in place on bfloat16 parameters without a master copy. With control.skip nothing is written.

    Args:
        param: bfloat16 [n], n a multiple of 16.
        exp_avg: bfloat16 [n].
        exp_avg_sq: bfloat16 [n].
        grad: bfloat16, float16 or float32 [n].
        control: one row float32 [16] of `step_control`.
        seed: seeds the random bits.
        start: index of element 0 in the unpartitioned buffer: with it and `seed`, the result does not depend on how the
            buffer was cut.
        tiles: made by `tiles_of` for this n, for parts with separate hyperparameters and positions (instead of `start`): one launch
            for all. `control` is then float32 [rows, 16], which the tiles index; elements outside of all tiles do not change.

    Raises:
        ValueError: a tensor of another shape, dtype or device, or not contiguous.
    """
    states = {"exp_avg": (exp_avg, flat.BFLOAT16), "exp_avg_sq": (exp_avg_sq, flat.BFLOAT16)}
    tensors = {"param": (param, flat.BFLOAT16), "grad": (grad, flat.GRAD_DTYPES)} | states
    flat.check("adamw_stochastic", tensors=tensors, control=control, tiles=tiles)
    flat.dispatch(
        _op, reference=adam_reference, param=param, grad=grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq,
        control=control, seed=seed, start=start, tiles=tiles,
    )  # fmt: skip


_STATES = {
    "param": Tensor.bfloat16,
    "exp_avg": lambda x: (x * 0.1).bfloat16(),
    "exp_avg_sq": lambda x: (x.square() * 0.01).bfloat16(),
}

SPEC = flat.spec(
    "adamw_stochastic",
    op=adamw_stochastic,
    reference=adam_reference,
    make_inputs=functools.partial(flat.make_inputs, states=_STATES, seed=7, start=0),
    mutated=("param", "exp_avg", "exp_avg_sq"),
    variants=({}, {"start": (1 << 32) - 16}, {"skip": True}, {"segments": True}),
    traffic=lambda itemsize: 12 + itemsize,
    flops=15,
)
