"""AdamW on bfloat16 parameters without a master copy: everything is 16 bits wide, the update is rounded stochastically.

A small update vanishes when a bfloat16 parameter is rounded to nearest, and with stochastic rounding survives in
expectation. Parameters take the low half of an element's random bits, exp_avg_sq the high half, exp_avg is rounded to
nearest (see `adamw_bf16`). Reads 8 and writes 6 bytes per parameter with a bfloat16 gradient; keeps 6.

Eight elements per thread: all tensors are 16 bits wide, so 16-byte accesses need no layout conversion. A float32
gradient takes four.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ztk.kernels._control import CONTROL_COLUMNS, SKIP, STEP, Control
from ztk.kernels._cpu import PIECE
from ztk.kernels._flat import ALIGNMENT, GRAD_DTYPES, control_row
from ztk.kernels._library import WARP_SIZE, register, use_reference
from ztk.kernels._math import cast
from ztk.kernels._rounding import (
    random_bits,
    random_bits_cpu,
    round_stochastic_bf16,
    round_stochastic_bf16_cpu,
)
from ztk.kernels._spec import AotCase, OpSpec, compute_dtype
from ztk.kernels.adamw_bf16 import adamw_cpu, update_moments, updated

NUM_WARPS = 4


@triton.jit(do_not_specialize=["seed", "start"])
def _adamw_stochastic(
    param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, control_ptr, N, seed, start,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of the AdamW update, parameters and second moments rounded stochastically"""
    if tl.load(control_ptr + SKIP) == 0.0:
        o_n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        m_n = o_n < N
        b_p = tl.load(param_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_g = tl.load(grad_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_m = tl.load(exp_avg_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_v = tl.load(exp_avg_sq_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_p, b_m, b_v = update_moments(control_ptr, b_p, b_g, b_m, b_v)
        b_random = random_bits(start + o_n, tl.load(control_ptr + STEP), seed)
        tl.store(param_ptr + o_n, round_stochastic_bf16(b_p, b_random), mask=m_n)
        tl.store(exp_avg_ptr + o_n, cast(b_m, exp_avg_ptr.dtype.element_ty), mask=m_n)
        tl.store(exp_avg_sq_ptr + o_n, round_stochastic_bf16(b_v, b_random >> 16), mask=m_n)


def _launch(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, control: Tensor, seed: int, start: int
) -> None:
    N = param.numel()
    block = (8 if grad.element_size() == 2 else 4) * WARP_SIZE * NUM_WARPS
    if N:
        _adamw_stochastic[(triton.cdiv(N, block),)](
            param, grad, exp_avg, exp_avg_sq, control, N, seed, start,
            BLOCK=block, num_warps=NUM_WARPS, enable_fp_fusion=True,
        )  # fmt: skip


def _cpu(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, control: Tensor, seed: int, start: int
) -> None:
    c = control.tolist()
    if c[Control.skip]:
        return
    for first in range(0, param.numel(), PIECE):
        cut = slice(first, first + PIECE)
        p, m, v = param[cut].float(), exp_avg[cut].float(), exp_avg_sq[cut].float()
        adamw_cpu(p, grad[cut], m, v, control, None, True)
        random = random_bits_cpu(start=start + first, count=p.numel(), step=int(c[Control.step]), seed=seed)
        param[cut].copy_(round_stochastic_bf16_cpu(p, random))
        exp_avg[cut].copy_(m)
        exp_avg_sq[cut].copy_(round_stochastic_bf16_cpu(v, random >> 16))


_op = register(
    "adamw_stochastic(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor control, "
    "int seed, int start) -> ()",
    triton=_launch,
    cpu=_cpu,
    fake=lambda param, grad, exp_avg, exp_avg_sq, control, seed, start: None,
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
) -> None:
    """One AdamW step in place on bfloat16 parameters without a master copy.

    param, exp_avg, exp_avg_sq: bfloat16 [n]; grad: bfloat16, float16 or float32 [n]; control: one row float32 [16] of
    `step_control`. n is a multiple of 16. `start` is the index of element 0 in the unpartitioned buffer: with it and
    `seed`, the result does not depend on how the buffer was cut. With control.skip nothing is written.
    """
    n = param.numel()
    if n % ALIGNMENT or control.shape != (CONTROL_COLUMNS,) or control.dtype != torch.float32:
        raise ValueError(
            f"adamw_stochastic: param has {n} elements and control is {tuple(control.shape)} {control.dtype}; pad to a "
            f"multiple of {ALIGNMENT} and pass one row float32 [{CONTROL_COLUMNS}]"
        )
    half = (torch.bfloat16,)
    for name, tensor, dtypes in (
        ("param", param, half), ("grad", grad, GRAD_DTYPES), ("exp_avg", exp_avg, half),
        ("exp_avg_sq", exp_avg_sq, half),
    ):  # fmt: skip
        if tensor.shape != (n,) or tensor.dtype not in dtypes or not tensor.is_contiguous():
            raise ValueError(
                f"adamw_stochastic: {name} is {tuple(tensor.shape)} {tensor.dtype}; it must be contiguous [{n}] of "
                f"{' or '.join(str(d)[6:] for d in dtypes)}"
            )
    if use_reference():
        adamw_stochastic_reference(
            param, grad=grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, control=control, seed=seed, start=start
        )
    else:
        _op(param, grad, exp_avg, exp_avg_sq, control, seed, start)


def adamw_stochastic_reference(
    param: Tensor,
    *,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    control: Tensor,
    seed: int = 0,
    start: int = 0,
) -> None:
    """The same update, one plain operation at a time; float64 tensors are not rounded."""
    c = control.to(compute_dtype(param))
    keep = c[Control.skip] != 0
    p, m, v = updated(param.to(c.dtype), g=grad.to(c.dtype), m=exp_avg.to(c.dtype), v=exp_avg_sq.to(c.dtype), control=c)
    if param.dtype == torch.bfloat16:
        random = random_bits_cpu(start=start, count=p.numel(), step=int(c[Control.step]), seed=seed).to(p.device)
        p, v = round_stochastic_bf16_cpu(p, random), round_stochastic_bf16_cpu(v, random >> 16)
    for old, new in ((param, p), (exp_avg, m), (exp_avg_sq, v)):
        old.copy_(torch.where(keep, old, new.to(old.dtype)))


def _make_inputs(shape, *, dtype, device, skip=False, start=0) -> dict[str, object]:
    (n,) = shape
    return {
        "param": torch.randn(n, device=device).bfloat16(),
        "grad": torch.randn(n, device=device).to(dtype),
        "exp_avg": (torch.randn(n, device=device) * 0.1).bfloat16(),
        "exp_avg_sq": (torch.rand(n, device=device) * 0.01).bfloat16(),
        "control": control_row(skip=skip, device=device),
        "seed": 7,
        "start": start,
    }


_POINTERS = ("param_ptr", "grad_ptr", "exp_avg_ptr", "exp_avg_sq_ptr", "control_ptr")


def _aot_case(grad: str, per_thread: int, **budget) -> AotCase:
    return AotCase(
        kernel=_adamw_stochastic,
        variant=f"{grad} grad",
        signature=dict.fromkeys(_POINTERS, "*bf16")
        | {"grad_ptr": f"*{grad}", "control_ptr": "*fp32", "N": "i64", "seed": "i64", "start": "i64"},
        constexprs={"BLOCK": per_thread * 32 * NUM_WARPS},
        hip_constexprs={"BLOCK": per_thread * 64 * NUM_WARPS},
        divisible_by_16=(*_POINTERS, "N"),
        num_warps=NUM_WARPS,
        max_barriers=0,
        elements_per_program=per_thread * 32 * NUM_WARPS,
        **budget,
    )


SPEC = OpSpec(
    name="adamw_stochastic",
    op=adamw_stochastic,
    reference=adamw_stochastic_reference,
    make_inputs=_make_inputs,
    mutated=("param", "exp_avg", "exp_avg_sq"),
    small_shapes=((16,), (528,), (2064,), (0,)),
    bench_shapes=((1 << 28,), (1_000_000_000,)),
    variants=({}, {"start": (1 << 32) - 16}, {"skip": True}),
    num_bytes=lambda shape, itemsize: shape[0] * (12 + itemsize),
    num_flops=lambda shape: 15 * shape[0],
    aot=(
        _aot_case("bf16", 8, max_registers=64, max_instructions_per_element=72),
        _aot_case(
            "fp32",
            4,
            max_registers=64,
            max_instructions_per_element=80,
            vector_store_bytes=8,
            vector_reason="four 16-bit values beside 16 bytes of float32 gradient",
        ),
    ),
)
