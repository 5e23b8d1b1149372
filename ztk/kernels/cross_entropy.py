"""Cross entropy on materialised logits, with ignored targets, z-loss and label smoothing; its gradient can replace the logits.

    lse      = log(sum(exp(x)))
    loss     = lse - (1 - s) * x[target] - s * mean(x) + z * lse^2                         (0 where target is ignored)
    d_x      = softmax(x) * (1 + 2 * z * lse) - s / V - (1 - s) * onehot(target)           (times d_loss / number of targets)

In place, forward reads the logits and writes the gradient over them: the second read of a row comes from the cache, so 4
bytes per 16-bit logit move in all, and backward only multiplies when the incoming gradient is not one. Out of place,
backward reads the logits again (6 bytes). float16 always works out of place: a gradient of a mean is too small for it
before the loss scale has been multiplied in. No host synchronisation: the number of targets stays on the device.

z-loss: Chowdhery et al., https://arxiv.org/abs/2204.02311; label smoothing: Szegedy et al., https://arxiv.org/abs/1512.00567
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ztk.kernels import _cross_entropy_cpu
from ztk.kernels._library import register, use_reference
from ztk.kernels._math import cast
from ztk.kernels._spec import AotCase, OpSpec, compute_dtype

ELEMENTS_PER_WARP = 1024  # four 16-byte loads of a 16-bit type in flight per thread
LONG_ROW = 65536
REDUCTIONS = ("mean", "sum", "none")

_LOWEST = tl.constexpr(-1e30)  # below any logit, yet finite: differences of maxima stay free of NaN


@triton.jit
def _cross_entropy_fwd(
    logits_ptr, target_ptr, weight_ptr, grad_ptr, loss_ptr, lse_ptr, V, ignore_index, z_loss, smoothing,
    WRITE_GRAD: tl.constexpr, HAS_SMOOTHING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """loss and lse of one row; with WRITE_GRAD also weight * d_x, which may overwrite the logits"""
    i_m = tl.program_id(0).to(tl.int64)
    p_x = logits_ptr + i_m * V
    p_grad = grad_ptr + i_m * V
    target = tl.load(target_ptr + i_m)
    is_target = target != ignore_index
    index = tl.where(is_target, target, 0)
    x_target = tl.load(p_x + index).to(tl.float32)

    # Phase 1: each lane keeps its own maximum and sum, one exponential per logit; they meet once at the end
    b_max = tl.full([BLOCK], _LOWEST, dtype=tl.float32)
    b_sum = tl.zeros([BLOCK], dtype=tl.float32)
    b_total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, V, BLOCK):
        o_n = start + tl.arange(0, BLOCK)
        m_n = o_n < V
        b_x = tl.load(p_x + o_n, mask=m_n, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)
        b_decay = tl.exp(-tl.abs(b_x - b_max))
        b_sum = tl.where(b_x > b_max, b_sum * b_decay + 1.0, b_sum + b_decay)
        b_max = tl.maximum(b_max, b_x)
        if HAS_SMOOTHING:
            b_total += tl.where(m_n, b_x, 0.0)
    x_max = tl.max(b_max, axis=0)
    lse = x_max + tl.log(tl.sum(b_sum * tl.exp(b_max - x_max), axis=0))

    # Phase 2: the loss of the row
    loss = lse - (1.0 - smoothing) * x_target + z_loss * lse * lse
    if HAS_SMOOTHING:
        loss -= smoothing * tl.sum(b_total, axis=0) / V
    tl.store(loss_ptr + i_m, tl.where(is_target, loss, 0.0))
    tl.store(lse_ptr + i_m, lse)

    # Phase 3: the gradient, from a second read that the cache serves
    if WRITE_GRAD:
        weight = tl.where(is_target, tl.load(weight_ptr), 0.0)
        scale = weight * (1.0 + 2.0 * z_loss * lse)
        shift = weight * smoothing / V
        hit = weight * (1.0 - smoothing)
        for start in range(0, V, BLOCK):
            o_n = start + tl.arange(0, BLOCK)
            m_n = o_n < V
            b_x = tl.load(p_x + o_n, mask=m_n, other=0.0, eviction_policy="evict_first").to(tl.float32)
            b_grad = tl.exp(b_x - lse) * scale - shift
            b_grad = tl.where(o_n == index, b_grad - hit, b_grad)
            b_grad = tl.where(is_target, b_grad, 0.0)
            tl.store(p_grad + o_n, cast(b_grad, grad_ptr.dtype.element_ty), mask=m_n)


@triton.jit
def _cross_entropy_bwd(
    logits_ptr, target_ptr, lse_ptr, d_loss_ptr, grad_ptr, V, stride_d, ignore_index, z_loss, smoothing,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """d_x of one tile of one row from its lse"""
    i_m = tl.program_id(0).to(tl.int64)
    o_n = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < V
    target = tl.load(target_ptr + i_m)
    is_target = target != ignore_index
    lse = tl.load(lse_ptr + i_m)
    weight = tl.load(d_loss_ptr + i_m * stride_d)
    b_x = tl.load(logits_ptr + i_m * V + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_grad = tl.exp(b_x - lse) * (weight * (1.0 + 2.0 * z_loss * lse)) - weight * smoothing / V
    b_grad = tl.where(o_n == target, b_grad - weight * (1.0 - smoothing), b_grad)
    b_grad = tl.where(is_target, b_grad, 0.0)
    tl.store(grad_ptr + i_m * V + o_n, cast(b_grad, grad_ptr.dtype.element_ty), mask=m_n)


@triton.jit
def _scale_rows(x_ptr, scale_ptr, V, stride_s, BLOCK: tl.constexpr):
    """x = x * scale, in place; a scale of one costs no memory traffic"""
    i_m = tl.program_id(0).to(tl.int64)
    scale = tl.load(scale_ptr + i_m * stride_s)
    if scale != 1.0:
        o_n = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        m_n = o_n < V
        b_x = tl.load(x_ptr + i_m * V + o_n, mask=m_n, other=0.0).to(tl.float32) * scale
        tl.store(x_ptr + i_m * V + o_n, cast(b_x, x_ptr.dtype.element_ty), mask=m_n)


def _block(V: int, *, smoothing: bool = False) -> tuple[int, int]:
    """Block size and warps for rows of V logits.

    A long row takes 16 warps: one program then fills a multiprocessor, and the rows in flight (132 of 256 KiB) stay in the
    second-level cache for their second read. Smoothing keeps a third accumulator, so it holds half the logits per thread.
    """
    per_warp = ELEMENTS_PER_WARP // 2 if smoothing else ELEMENTS_PER_WARP
    warps = 16 if V >= LONG_ROW else 8
    block = min(per_warp * warps, triton.next_power_of_2(V))
    return block, max(1, min(warps, block // per_warp))


def _launch_fwd_into(
    grad: Tensor | None,
    logits: Tensor,
    target: Tensor,
    weight: Tensor,
    ignore_index: int,
    z_loss: float,
    smoothing: float,
) -> tuple[Tensor, Tensor]:
    M, V = logits.shape
    loss, lse = (torch.empty(M, dtype=torch.float32, device=logits.device) for _ in range(2))
    if M:
        block, num_warps = _block(V, smoothing=smoothing != 0.0)
        _cross_entropy_fwd[(M,)](
            logits, target, weight, logits if grad is None else grad, loss, lse, V, ignore_index, z_loss, smoothing,
            WRITE_GRAD=grad is not None, HAS_SMOOTHING=smoothing != 0.0, BLOCK=block, num_warps=num_warps,
            enable_fp_fusion=True,
        )  # fmt: skip
    return loss, lse


def _launch_fwd(
    logits: Tensor, target: Tensor, ignore_index: int, z_loss: float, smoothing: float
) -> tuple[Tensor, Tensor]:
    return _launch_fwd_into(None, logits, target, logits, ignore_index, z_loss, smoothing)


def _launch_fwd_in_place(
    logits: Tensor, target: Tensor, weight: Tensor, ignore_index: int, z_loss: float, smoothing: float
) -> Tensor:
    return _launch_fwd_into(logits, logits, target, weight, ignore_index, z_loss, smoothing)[0]


def _launch_bwd(
    logits: Tensor, target: Tensor, lse: Tensor, d_loss: Tensor, ignore_index: int, z_loss: float, smoothing: float
) -> Tensor:
    M, V = logits.shape
    grad = torch.empty_like(logits)
    if M:
        block, num_warps = _block(V)
        _cross_entropy_bwd[(M, triton.cdiv(V, block))](
            logits, target, lse, d_loss, grad, V, int(d_loss.numel() > 1), ignore_index, z_loss, smoothing,
            BLOCK=block, num_warps=num_warps, enable_fp_fusion=True,
        )  # fmt: skip
    return grad


def _launch_scale(x: Tensor, scale: Tensor) -> None:
    M, V = x.shape
    if M:
        block, num_warps = _block(V)
        _scale_rows[(M, triton.cdiv(V, block))](
            x, scale, V, int(scale.numel() > 1), BLOCK=block, num_warps=num_warps, enable_fp_fusion=True
        )


_OPTIONS = "int ignore_index, float z_loss, float smoothing"
_forward = register(
    f"cross_entropy(Tensor logits, Tensor target, {_OPTIONS}) -> (Tensor, Tensor)",
    triton=_launch_fwd,
    cpu=_cross_entropy_cpu.fwd,
    fake=lambda logits, target, *options: tuple(
        logits.new_empty(logits.shape[0], dtype=torch.float32) for _ in range(2)
    ),
)
_forward_in_place = register(
    f"cross_entropy_in_place(Tensor(a!) logits, Tensor target, Tensor weight, {_OPTIONS}) -> Tensor",
    triton=_launch_fwd_in_place,
    cpu=_cross_entropy_cpu.fwd_in_place,
    fake=lambda logits, target, weight, *options: logits.new_empty(logits.shape[0], dtype=torch.float32),
)
_backward = register(
    f"cross_entropy_backward(Tensor logits, Tensor target, Tensor lse, Tensor d_loss, {_OPTIONS}) -> Tensor",
    triton=_launch_bwd,
    cpu=_cross_entropy_cpu.bwd,
    fake=lambda logits, target, lse, d_loss, *options: torch.empty_like(logits),
)
_scale = register(
    "scale_rows(Tensor(a!) x, Tensor scale) -> ()",
    triton=_launch_scale,
    cpu=_cross_entropy_cpu.scale,
    fake=lambda x, scale: None,
)


def _reduce(loss: Tensor, *, weight: Tensor, reduction: str) -> Tensor:
    """The rows' losses [M], or their weighted sum []."""
    return loss if reduction == "none" else (loss.sum() * weight).reshape(())


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, target: Tensor, weight: Tensor, reduction: str, options: tuple) -> Tensor:
        loss, lse = _forward(logits, target, *options)
        ctx.save_for_backward(logits, target, lse, weight)
        ctx.options = options
        return _reduce(loss, weight=weight, reduction=reduction)

    @staticmethod
    def backward(ctx, d_loss: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, target, lse, weight = ctx.saved_tensors
        grad = _backward(logits, target, lse, d_loss.reshape(-1) * weight, *ctx.options)
        return grad, None, None, None, None


class _CrossEntropyInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, target: Tensor, weight: Tensor, reduction: str, options: tuple) -> Tensor:
        ctx.gradient = logits.detach()
        loss = _forward_in_place(ctx.gradient, target, weight, *options)
        return _reduce(loss, weight=weight, reduction=reduction)

    @staticmethod
    def backward(ctx, d_loss: Tensor) -> tuple[Tensor, None, None, None, None]:
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:
            raise RuntimeError("cross_entropy(inplace=True): its gradient was handed over by an earlier backward")
        _scale(gradient, d_loss.reshape(-1).contiguous())
        return gradient, None, None, None, None


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    inplace: bool = False,
) -> Tensor:
    """The negative log-likelihood of `target` under softmax(logits), in float32.

    logits: [..., V]; target: [...] int64, positions equal to `ignore_index` count for nothing. Adds z_loss * lse^2 and
    smooths the target distribution by `label_smoothing`. reduction: "mean" over the targets that count (0 when there are
    none), "sum", or "none" for [...]. With `inplace` the logits are lost: where their gradient is needed it takes their
    memory, and one backward may follow. Without a gradient, and in float16, the logits stay as they are.
    """
    if target.shape != logits.shape[:-1] or target.dtype != torch.int64:
        raise ValueError(
            f"cross_entropy: target is {tuple(target.shape)} {target.dtype}; logits {tuple(logits.shape)} need int64 "
            f"{tuple(logits.shape[:-1])}"
        )
    if reduction not in REDUCTIONS:
        raise ValueError(f"cross_entropy: reduction={reduction!r} is unknown; choose one of {', '.join(REDUCTIONS)}")
    if use_reference():
        return cross_entropy_reference(
            logits,
            target,
            ignore_index=ignore_index,
            z_loss=z_loss,
            label_smoothing=label_smoothing,
            reduction=reduction,
        )
    rows, flat_target = logits.reshape(-1, logits.shape[-1]).contiguous(), target.reshape(-1).contiguous()
    options = (ignore_index, z_loss, label_smoothing)
    if reduction == "mean":
        weight = (flat_target != ignore_index).sum().clamp(min=1).float().reciprocal().reshape(1)
    else:
        weight = torch.ones(1, dtype=torch.float32, device=logits.device)
    needs_grad = logits.requires_grad and torch.is_grad_enabled()
    if not needs_grad:
        loss = _reduce(_forward(rows, flat_target, *options)[0], weight=weight, reduction=reduction)
    elif inplace and logits.dtype != torch.float16:
        loss = _CrossEntropyInPlace.apply(rows, flat_target, weight, reduction, options)
    else:
        loss = _CrossEntropy.apply(rows, flat_target, weight, reduction, options)
    return loss.view(target.shape) if reduction == "none" else loss


def cross_entropy_reference(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    inplace: bool = False,
) -> Tensor:
    """The same in plain torch, float32 inside; `inplace` allows and changes nothing here."""
    x = logits.to(compute_dtype(logits))
    lse = torch.logsumexp(x, dim=-1)
    is_target = target != ignore_index
    picked = x.gather(-1, torch.where(is_target, target, 0)[..., None])[..., 0]
    loss = lse - (1 - label_smoothing) * picked - label_smoothing * x.mean(-1) + z_loss * lse.square()
    loss = torch.where(is_target, loss, 0.0)
    if reduction == "none":
        return loss
    return loss.sum() / is_target.sum().clamp(min=1) if reduction == "mean" else loss.sum()


def _eager(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    inplace: bool = False,
) -> Tensor:
    x, flat = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    loss = torch.nn.functional.cross_entropy(
        x, flat, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    loss = loss + torch.where(flat != ignore_index, z_loss * torch.logsumexp(x, dim=-1).square(), 0.0)
    if reduction == "none":
        return loss.view(target.shape)
    return loss.sum() / (flat != ignore_index).sum().clamp(min=1) if reduction == "mean" else loss.sum()


def _make_inputs(
    shape: tuple[int, ...], *, dtype: torch.dtype, device: str, ignored: bool = True, **options: object
) -> dict[str, object]:
    *leading, V = shape
    target = torch.randint(0, V, tuple(leading), device=device)
    if ignored and target.numel() > 1:
        target.view(-1)[::3] = -100
    return {"logits": (2 * torch.randn(shape, device=device)).to(dtype), "target": target} | options


def _aot_case(kernel: object, *, V: int, **flags: bool) -> AotCase:
    types = dict.fromkeys(("weight_ptr", "loss_ptr", "lse_ptr", "d_loss_ptr", "scale_ptr"), "*fp32")
    types |= dict.fromkeys(("logits_ptr", "grad_ptr", "x_ptr"), "*bf16") | {"target_ptr": "*i64", "V": "i32"}
    types |= {"stride_d": "i32", "stride_s": "i32", "ignore_index": "i32", "z_loss": "fp32", "smoothing": "fp32"}
    block, num_warps = _block(V, smoothing=flags.get("HAS_SMOOTHING", False))
    signature = {name: types[name] for name in kernel.arg_names if name in types}
    return AotCase(
        kernel=kernel,
        variant=f"V={V}" + "".join(f", {name.lower()}" for name, on in flags.items() if on),
        signature=signature,
        constexprs=flags | {"BLOCK": block},
        divisible_by_16=tuple(name for name in signature if name.endswith("_ptr") or name == "V"),
        num_warps=num_warps,
        max_registers=128,
        max_barriers=None if "WRITE_GRAD" in flags else 0,
        vector_store_bytes=0 if flags.get("WRITE_GRAD") is False else 16,
        vector_reason="stores two numbers per row" if flags.get("WRITE_GRAD") is False else "",
    )


SPEC = OpSpec(
    name="cross_entropy",
    op=cross_entropy,
    reference=cross_entropy_reference,
    eager=_eager,
    make_inputs=_make_inputs,
    differentiable=("logits",),
    small_shapes=((1, 2), (3, 41), (2, 5, 130), (4, 9001)),
    bench_shapes=((8192, 32768), (8192, 131072)),
    variants=(
        {},
        {"inplace": True},
        {"z_loss": 1e-2, "label_smoothing": 0.1, "reduction": "sum", "inplace": True},
        {"z_loss": 1e-2, "label_smoothing": 0.1, "reduction": "none", "ignored": False},
    ),
    num_bytes=lambda shape, itemsize: 2 * shape[0] * shape[1] * itemsize,
    num_bytes_backward=lambda shape, itemsize: 0,  # in place the gradient is there already
    num_flops=lambda shape: 8 * shape[0] * shape[1],
    aot=(
        _aot_case(_cross_entropy_fwd, V=131072, WRITE_GRAD=True, HAS_SMOOTHING=False),
        _aot_case(_cross_entropy_fwd, V=131072, WRITE_GRAD=True, HAS_SMOOTHING=True),
        _aot_case(_cross_entropy_fwd, V=32768, WRITE_GRAD=False, HAS_SMOOTHING=False),
        _aot_case(_cross_entropy_bwd, V=131072),
        _aot_case(_scale_rows, V=131072),
    ),
)
