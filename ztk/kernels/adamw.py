"""Adam and AdamW on a flat partition: unscale, clip, skip, update and the 16-bit copy in one pass.

    g          = grad * grad_coefficient                    (+ weight_decay * master when not decoupled)
    exp_avg    = exp_avg + (1 - beta1) * (g - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g^2
    master     = master * (1 - lr * weight_decay) - lr / bias_correction1 * exp_avg / (sqrt(exp_avg_sq) / bias_correction2_sqrt + eps)
    out        = master, rounded

Reads 14 and writes 14 bytes per parameter with a 16-bit gradient and a 16-bit `out`; a step with control.skip reads one
scalar. Four elements per thread: more make Triton convert layouts between float32 and 16-bit tensors through shared
memory (5 to 23 barriers in an elementwise kernel), fewer leave vector loads narrow.

Kingma and Ba, https://arxiv.org/abs/1412.6980; Loshchilov and Hutter, https://arxiv.org/abs/1711.05101
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ztk.kernels._control import BETA1, BETA2, BIAS1, BIAS2, COEFFICIENT, EPS, LR, SKIP, WEIGHT_DECAY, Control
from ztk.kernels._cpu import UPDATE_PIECE, scaled_float32
from ztk.kernels._flat import check_flat, control_row
from ztk.kernels._library import WARP_SIZE, register, use_reference
from ztk.kernels._math import cast
from ztk.kernels._spec import AotCase, OpSpec, compute_dtype

NUM_WARPS = 4
BLOCK = 4 * WARP_SIZE * NUM_WARPS


@triton.jit
def _adamw(
    master_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, control_ptr, out_ptr, N,
    DECOUPLED: tl.constexpr, HAS_OUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of the module docstring's update"""
    if tl.load(control_ptr + SKIP) == 0.0:
        i_n = tl.program_id(0).to(tl.int64)
        o_n = i_n * BLOCK + tl.arange(0, BLOCK)
        m_n = o_n < N
        coefficient = tl.load(control_ptr + COEFFICIENT)
        lr = tl.load(control_ptr + LR)
        beta1 = tl.load(control_ptr + BETA1)
        beta2 = tl.load(control_ptr + BETA2)
        eps = tl.load(control_ptr + EPS)
        weight_decay = tl.load(control_ptr + WEIGHT_DECAY)
        step_size = lr / tl.load(control_ptr + BIAS1)
        inverse_bias2 = 1.0 / tl.load(control_ptr + BIAS2)

        b_p = tl.load(master_ptr + o_n, mask=m_n, other=0.0)
        b_g = tl.load(grad_ptr + o_n, mask=m_n, other=0.0).to(tl.float32) * coefficient
        b_m = tl.load(exp_avg_ptr + o_n, mask=m_n, other=0.0)
        b_v = tl.load(exp_avg_sq_ptr + o_n, mask=m_n, other=0.0)
        if DECOUPLED:
            b_p = b_p * (1.0 - lr * weight_decay)
        else:
            b_g = b_g + weight_decay * b_p
        b_m = b_m + (1.0 - beta1) * (b_g - b_m)
        b_v = beta2 * b_v + (1.0 - beta2) * b_g * b_g
        b_p = b_p - step_size * (b_m / (tl.sqrt(b_v) * inverse_bias2 + eps))

        tl.store(master_ptr + o_n, b_p, mask=m_n)
        tl.store(exp_avg_ptr + o_n, b_m, mask=m_n)
        tl.store(exp_avg_sq_ptr + o_n, b_v, mask=m_n)
        if HAS_OUT:
            tl.store(out_ptr + o_n, cast(b_p, out_ptr.dtype.element_ty), mask=m_n)


def _launch(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    control: Tensor,
    out: Tensor | None,
    decoupled: bool,
) -> None:
    N = master.numel()
    if N:
        _adamw[(triton.cdiv(N, BLOCK),)](
            master, grad, exp_avg, exp_avg_sq, control, master if out is None else out, N,
            DECOUPLED=decoupled, HAS_OUT=out is not None, BLOCK=BLOCK, num_warps=NUM_WARPS, enable_fp_fusion=True,
        )  # fmt: skip


_NEVER = torch.tensor(1e30, device="cpu")  # a step count at which beta^step is 0, so torch's own bias corrections are 1


def _cpu(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    control: Tensor,
    out: Tensor | None,
    decoupled: bool,
) -> None:
    # torch's fused kernel works in 16-element units, so on partitions of whole units it is a function of the element
    # alone. Its bias corrections are folded into lr, eps and weight_decay instead of a step count.
    c = control.tolist()
    if c[Control.skip]:
        return
    bias1, bias2 = c[Control.bias_correction1], c[Control.bias_correction2_sqrt]
    update = torch._fused_adamw_ if decoupled else torch._fused_adam_
    hyper = {
        "lr": c[Control.lr] * bias2 / bias1,
        "beta1": c[Control.beta1],
        "beta2": c[Control.beta2],
        "eps": c[Control.eps] * bias2,
        "weight_decay": c[Control.weight_decay] * (bias1 / bias2 if decoupled else 1.0),
        "amsgrad": False,
        "maximize": False,
    }
    for start in range(0, master.numel(), UPDATE_PIECE):
        cut = slice(start, start + UPDATE_PIECE)
        p = master[cut]
        g = scaled_float32(grad[cut], scale=c[Control.grad_coefficient])
        update([p], [g], [exp_avg[cut]], [exp_avg_sq[cut]], [], [_NEVER], **hyper)
        if out is not None:
            out[cut].copy_(p)


_op = register(
    "adamw(Tensor(a!) master, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor control, Tensor(d!)? out, "
    "bool decoupled) -> ()",
    triton=_launch,
    cpu=_cpu,
    fake=lambda master, grad, exp_avg, exp_avg_sq, control, out, decoupled: None,
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
) -> None:
    """One AdamW step in place (Adam with L2 regularisation when `decoupled` is False).

    master, exp_avg, exp_avg_sq: float32 [n]; grad: float32, bfloat16 or float16 [n], left as it is; control: one row
    float32 [16] written by `step_control`; out: optional 16-bit [n] that receives the rounded master. n is a multiple of
    16. The result for an element depends on that element and `control` alone, so any partition of a buffer into
    multiples of 16 gives the same bits as the whole. With control.skip nothing is written.
    """
    check_flat(
        "adamw", master, grad=grad, states={"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}, control=control, out=out
    )
    if use_reference():
        adamw_reference(
            master, grad=grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, control=control, out=out, decoupled=decoupled
        )
    else:
        _op(master, grad, exp_avg, exp_avg_sq, control, out, decoupled)


def adamw_reference(
    master: Tensor,
    *,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    control: Tensor,
    out: Tensor | None = None,
    decoupled: bool = True,
) -> None:
    """The same update, one plain operation at a time."""
    c = control.to(compute_dtype(master))
    keep = c[Control.skip] != 0
    g = grad.to(c.dtype) * c[Control.grad_coefficient]
    if not decoupled:
        g = g + c[Control.weight_decay] * master
    m = exp_avg + (1 - c[Control.beta1]) * (g - exp_avg)
    v = c[Control.beta2] * exp_avg_sq + (1 - c[Control.beta2]) * g * g
    p = master * (1 - c[Control.lr] * c[Control.weight_decay]) if decoupled else master
    denominator = v.sqrt() / c[Control.bias_correction2_sqrt] + c[Control.eps]
    p = p - c[Control.lr] / c[Control.bias_correction1] * m / denominator
    if out is not None:
        out.copy_(torch.where(keep, out, p.to(out.dtype)))
    for old, new in ((master, p), (exp_avg, m), (exp_avg_sq, v)):
        old.copy_(torch.where(keep, old, new))


def _make_inputs(
    shape: tuple[int, ...],
    *,
    dtype: torch.dtype,
    device: str,
    with_out: bool = True,
    decoupled: bool = True,
    skip: bool = False,
    step: int = 3,
) -> dict[str, object]:
    (n,) = shape
    return {
        "master": torch.randn(n, device=device),
        "grad": torch.randn(n, device=device).to(dtype),
        "exp_avg": torch.randn(n, device=device) * 0.1,
        "exp_avg_sq": torch.rand(n, device=device) * 0.01,
        "control": control_row(skip=skip, step=step, device=device),
        "out": torch.zeros(n, dtype=torch.bfloat16 if dtype == torch.float32 else dtype, device=device)
        if with_out
        else None,
        "decoupled": decoupled,
    }


def _aot_case(*, grad: str, out: bool) -> AotCase:
    pointers = ("master_ptr", "grad_ptr", "exp_avg_ptr", "exp_avg_sq_ptr", "control_ptr", "out_ptr")
    constexprs = {"DECOUPLED": True, "HAS_OUT": out}
    return AotCase(
        kernel=_adamw,
        variant=f"{grad} grad{', out' if out else ''}",
        signature=dict.fromkeys(pointers, "*fp32") | {"grad_ptr": f"*{grad}", "out_ptr": "*bf16", "N": "i64"},
        constexprs=constexprs | {"BLOCK": 4 * 32 * NUM_WARPS},
        hip_constexprs={"BLOCK": 4 * 64 * NUM_WARPS},
        divisible_by_16=(*pointers, "N"),
        num_warps=NUM_WARPS,
        max_registers=40,
        max_barriers=0,
        elements_per_program=4 * 32 * NUM_WARPS,
        max_instructions_per_element=64,
    )


SPEC = OpSpec(
    name="adamw",
    op=adamw,
    reference=adamw_reference,
    make_inputs=_make_inputs,
    mutated=("master", "exp_avg", "exp_avg_sq", "out"),
    small_shapes=((16,), (528,), (2064,), (0,)),
    bench_shapes=((1 << 24,), (1 << 28,), (1_000_000_000,)),
    variants=({}, {"with_out": False}, {"decoupled": False}, {"skip": True}),
    num_bytes=lambda shape, itemsize: shape[0] * (24 + 2 * itemsize),
    num_flops=lambda shape: 15 * shape[0],
    aot=(_aot_case(grad="bf16", out=True), _aot_case(grad="fp32", out=False)),
)
