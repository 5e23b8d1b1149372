"""AdamW on bfloat16 parameters without a master copy: everything is 16 bits wide, the update is rounded stochastically.

A small update vanishes when a bfloat16 parameter is rounded to nearest, and with stochastic rounding survives in
expectation. Parameters take the low half of an element's random bits, exp_avg_sq the high half, exp_avg is rounded to
nearest (see `adamw_bf16`). Reads 8 and writes 6 bytes per parameter with a bfloat16 gradient; keeps 6.

Eight elements per thread: all tensors are 16 bits wide, so 16-byte accesses need no layout conversion. A float32
gradient takes four.
"""

import functools

import torch
import triton.language as tl
from torch import Tensor

from ztk.kernels.launch.jit import jit
from ztk.kernels.shared.adam import update, update_cpu, updated
from ztk.kernels.shared.control import SKIP, STEP, Control
from ztk.kernels.shared.cpu import PIECE
from ztk.kernels.shared.flat import (
    BFLOAT16,
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
from ztk.kernels.shared.rounding import random_bits, random_bits_like, round_stochastic_bf16, round_stochastic_bf16_cpu
from ztk.kernels.shared.spec import compute_dtype
from ztk.kernels.shared.tiles import each_tile, part_of


@jit(do_not_specialize=["seed", "start"])
def _adamw_stochastic(
    param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, control_ptr, tiles_ptr, N, seed, start,
    PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of the AdamW update, parameters and second moments rounded stochastically"""
    if tl.load(control_ptr + SKIP) == 0.0:
        first, stop, control_ptr, shift = part_of(tiles_ptr, control_ptr, N, start, PROGRAMS, BLOCK)
        o_n = first + tl.arange(0, BLOCK)
        m_n = o_n < stop
        b_p = tl.load(param_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_g = tl.load(grad_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_m = tl.load(exp_avg_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_v = tl.load(exp_avg_sq_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_p, b_m, b_v = update(control_ptr, b_p, b_g, b_m, b_v, True)
        b_random = random_bits(shift + o_n, tl.load(control_ptr + STEP), seed)
        tl.store(param_ptr + o_n, round_stochastic_bf16(b_p, b_random), mask=m_n)
        tl.store(exp_avg_ptr + o_n, cast(b_m, exp_avg_ptr.dtype.element_ty), mask=m_n)
        tl.store(exp_avg_sq_ptr + o_n, round_stochastic_bf16(b_v, b_random >> 16), mask=m_n)


_launches = flat_launches(_adamw_stochastic)


def _launch(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    control: Tensor,
    seed: int,
    start: int,
    tiles: Tensor | None,
) -> None:
    per_thread = 8 if grad.element_size() == 2 else 4
    launch_flat(
        _launches, param, grad, exp_avg, exp_avg_sq, control, tiles=tiles, numbers=(seed, start), per_thread=per_thread
    )


def _cpu(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, control: list, seed: int, start: int
) -> None:
    for first in range(0, param.numel(), PIECE):
        cut = slice(first, first + PIECE)
        p, m, v = param[cut].float(), exp_avg[cut].float(), exp_avg_sq[cut].float()
        update_cpu(p, grad[cut], m, v, control=control)
        random = random_bits_like(p, start=start + first, step=int(control[Control.step]), seed=seed)
        param[cut].copy_(round_stochastic_bf16_cpu(p, random))
        exp_avg[cut].copy_(m)
        exp_avg_sq[cut].copy_(round_stochastic_bf16_cpu(v, random >> 16))


_op = register_update(
    "adamw_stochastic(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor control, "
    "int seed, int start, Tensor? tiles) -> ()",
    launch=_launch,
    update=_cpu,
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
        exp_avg: as `param`.
        exp_avg_sq: as `param`.
        grad: bfloat16, float16 or float32 [n].
        control: one row float32 [16] of `step_control`.
        seed: of the random bits.
        start: index of element 0 in the unpartitioned buffer: with it and `seed`, the result does not depend on how the
            buffer was cut.
        tiles: of `tiles_of` for this n, where parts have hyperparameters of their own, and positions in the place of `start`: one launch
            for all. `control` is then float32 [rows, 16], of which the tiles name theirs; elements of no tile stay as they are.

    Raises:
        ValueError: a tensor of another shape, dtype or device, or not contiguous.
    """
    states = {"exp_avg": (exp_avg, BFLOAT16), "exp_avg_sq": (exp_avg_sq, BFLOAT16)}
    tensors = {"param": (param, BFLOAT16), "grad": (grad, GRAD_DTYPES)} | states
    check_flat("adamw_stochastic", tensors=tensors, control=control, tiles=tiles)
    dispatch(
        _op, reference=adamw_stochastic_reference, param=param, grad=grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq,
        control=control, seed=seed, start=start, tiles=tiles,
    )  # fmt: skip


def adamw_stochastic_reference(
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
    """The same update, one plain operation at a time; float64 tensors are not rounded."""
    if tiles is not None:
        states = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        for part in each_tile(tiles, param=param, grad=grad, **states, control=control, seed=seed, start=start):
            adamw_stochastic_reference(**part)
        return
    c = control.to(compute_dtype(param))
    p, m, v = updated(param.to(c.dtype), g=grad.to(c.dtype), m=exp_avg.to(c.dtype), v=exp_avg_sq.to(c.dtype), control=c)
    if param.dtype == torch.bfloat16:
        random = random_bits_like(p, start=start, step=int(c[Control.step]), seed=seed)
        p, v = round_stochastic_bf16_cpu(p, random), round_stochastic_bf16_cpu(v, random >> 16)
    write_unless_skipped(c, (param, p), (exp_avg, m), (exp_avg_sq, v))


_make_inputs = functools.partial(
    make_flat_inputs,
    states={
        "param": Tensor.bfloat16,
        "exp_avg": lambda x: (x * 0.1).bfloat16(),
        "exp_avg_sq": lambda x: (x.square() * 0.01).bfloat16(),
    },
    seed=7,
    start=0,
)

SPEC = flat_spec(
    "adamw_stochastic",
    op=adamw_stochastic,
    reference=adamw_stochastic_reference,
    make_inputs=_make_inputs,
    mutated=("param", "exp_avg", "exp_avg_sq"),
    variants=({}, {"start": (1 << 32) - 16}, {"skip": True}, {"segments": True}),
    traffic=lambda itemsize: 12 + itemsize,
    flops=15,
)
