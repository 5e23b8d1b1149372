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
from ztk.kernels.shared.adam import update, update_cpu, updated
from ztk.kernels.shared.control import SKIP, STEP, Control
from ztk.kernels.shared.cpu import PIECE
from ztk.kernels.shared.flat import (
    BFLOAT16,
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
from ztk.kernels.shared.rounding import random_bits, random_bits_like, round_stochastic_bf16, round_stochastic_bf16_cpu
from ztk.kernels.shared.spec import compute_dtype
from ztk.kernels.shared.tiles import each_tile, part_of


@jit(do_not_specialize=["seed", "start"])
def _adamw_bf16(
    master_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, control_ptr, out_ptr, tiles_ptr, N, seed, start,
    PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of the AdamW update, moments rounded on store"""
    if tl.load(control_ptr + SKIP) == 0.0:
        first, stop, control_ptr, shift = part_of(tiles_ptr, control_ptr, N, start, PROGRAMS, BLOCK)
        o_n = first + tl.arange(0, BLOCK)
        m_n = o_n < stop
        b_p = tl.load(master_ptr + o_n, mask=m_n, other=0.0)
        b_g = tl.load(grad_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_m = tl.load(exp_avg_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_v = tl.load(exp_avg_sq_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_p, b_m, b_v = update(control_ptr, b_p, b_g, b_m, b_v, True)
        b_random = random_bits(shift + o_n, tl.load(control_ptr + STEP), seed)
        tl.store(master_ptr + o_n, b_p, mask=m_n)
        tl.store(exp_avg_ptr + o_n, cast(b_m, exp_avg_ptr.dtype.element_ty), mask=m_n)
        tl.store(exp_avg_sq_ptr + o_n, round_stochastic_bf16(b_v, b_random), mask=m_n)
        if out_ptr is not None:
            tl.store(out_ptr + o_n, cast(b_p, out_ptr.dtype.element_ty), mask=m_n)


_launches = flat_launches(_adamw_bf16)


def _launch(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    control: Tensor,
    out: Tensor | None,
    seed: int,
    start: int,
    tiles: Tensor | None,
) -> None:
    launch_flat(_launches, master, grad, exp_avg, exp_avg_sq, control, out, tiles=tiles, numbers=(seed, start))


def _cpu(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    control: list,
    out: Tensor | None,
    seed: int,
    start: int,
) -> None:
    for first in range(0, master.numel(), PIECE):
        cut = slice(first, first + PIECE)
        p, m, v = master[cut], exp_avg[cut].float(), exp_avg_sq[cut].float()
        update_cpu(p, grad[cut], m, v, control=control)
        random = random_bits_like(p, start=start + first, step=int(control[Control.step]), seed=seed)
        exp_avg[cut].copy_(m)
        exp_avg_sq[cut].copy_(round_stochastic_bf16_cpu(v, random))
        if out is not None:
            out[cut].copy_(p)


_op = register_update(
    "adamw_bf16(Tensor(a!) master, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor control, "
    "Tensor(d!)? out, int seed, int start, Tensor? tiles) -> ()",
    launch=_launch,
    update=_cpu,
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
        exp_avg_sq: as `exp_avg`.
        grad: float32, bfloat16 or float16 [n].
        control: one row float32 [16] of `step_control`.
        out: optional 16-bit [n] that receives the rounded master.
        seed: of the random bits.
        start: index of element 0 in the unpartitioned buffer: with it and `seed`, the result does not depend on how the
            buffer was cut.
        tiles: of `tiles_of` for this n, where parts have hyperparameters of their own, and positions in the place of `start`: one launch
            for all. `control` is then float32 [rows, 16], of which the tiles name theirs; elements of no tile stay as they are.

    Raises:
        ValueError: a tensor of another shape, dtype or device, or not contiguous.
    """
    states = {"exp_avg": (exp_avg, BFLOAT16), "exp_avg_sq": (exp_avg_sq, BFLOAT16), "out": (out, GRAD_DTYPES)}
    tensors = {"master": (master, FLOAT32), "grad": (grad, GRAD_DTYPES)} | states
    check_flat("adamw_bf16", tensors=tensors, control=control, tiles=tiles)
    dispatch(
        _op, reference=adamw_bf16_reference, master=master, grad=grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq,
        control=control, out=out, seed=seed, start=start, tiles=tiles,
    )  # fmt: skip


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
    tiles: Tensor | None = None,
) -> None:
    """The same update, one plain operation at a time; float64 moments are not rounded."""
    if tiles is not None:
        states = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "out": out}
        for part in each_tile(tiles, master=master, grad=grad, **states, control=control, seed=seed, start=start):
            adamw_bf16_reference(**part)
        return
    c = control.to(compute_dtype(master))
    p, m, v = updated(master, g=grad.to(c.dtype), m=exp_avg.to(c.dtype), v=exp_avg_sq.to(c.dtype), control=c)
    if exp_avg_sq.dtype == torch.bfloat16:
        v = round_stochastic_bf16_cpu(v, random_bits_like(p, start=start, step=int(c[Control.step]), seed=seed))
    write_unless_skipped(c, (out, p), (master, p), (exp_avg, m), (exp_avg_sq, v))


_make_inputs = functools.partial(
    make_flat_inputs,
    states={
        "master": torch.clone,
        "exp_avg": lambda x: (x * 0.1).bfloat16(),
        "exp_avg_sq": lambda x: (x.square() * 0.01).bfloat16(),
    },
    with_out=True,
    seed=7,
    start=0,
)

SPEC = flat_spec(
    "adamw_bf16",
    op=adamw_bf16,
    reference=adamw_bf16_reference,
    make_inputs=_make_inputs,
    mutated=("master", "exp_avg", "exp_avg_sq", "out"),
    variants=({}, {"with_out": False, "start": (1 << 32) - 16}, {"skip": True}, {"segments": True}),
    traffic=lambda itemsize: 16 + 2 * itemsize,
    flops=15,
)
