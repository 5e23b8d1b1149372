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

from ztk.kernels.launch.functions import OnceFunction
from ztk.kernels.launch.grids import cdiv
from ztk.kernels.launch.jit import Bound, bind, jit, kept
from ztk.kernels.launch.library import needs_reference, register
from ztk.kernels.launch.machine import Machine, machine
from ztk.kernels.launch.memory import Memory, maker, memory_of
from ztk.kernels.shared import cross_entropy_cpu
from ztk.kernels.shared.logit_tiles import LaunchConfig
from ztk.kernels.shared.math import cast
from ztk.kernels.shared.spec import OpSpec, compute_dtype

REDUCTIONS = ("mean", "sum", "none")

_LOWEST = tl.constexpr(-1e30)  # below any logit, yet finite: differences of maxima stay free of NaN
_HIGHEST = tl.constexpr(3e38)  # an infinite maximum would turn the row's sum into NaN instead of infinity
_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _tile(first, V, CHUNKS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """(offsets, mask) [CHUNKS, LANES, VECTOR] of a tile of a row: a thread holds one lane, CHUNKS vectors of 16 bytes"""
    o_lane = tl.arange(0, CHUNKS)[:, None, None] * LANES + tl.arange(0, LANES)[None, :, None]
    o_n = first + o_lane * VECTOR + tl.arange(0, VECTOR)[None, None, :]
    return o_n, o_n < V


@triton.jit
def _add_tile(b_shift, b_sum, b_total, b_x, LOG2: tl.constexpr, HAS_SMOOTHING: tl.constexpr):
    """Each lane's running (maximum, sum of exponentials below it, sum of logits) with a tile of logits added

    Maxima and sums of a lane stay inside its thread: per logit one maximum, one exponential, one sum, and with LOG2, the maximum in units of
    log2, one multiply-add. Else a subtraction and a product: the largest logit's exponential is exactly 1.
    """
    b_max = tl.max(tl.max(b_x, axis=2), axis=0)
    if LOG2:
        b_new = tl.maximum(b_shift, tl.minimum(b_max * _LOG2E, _HIGHEST))
        b_p = tl.exp2(b_x * _LOG2E - b_new[None, :, None])
        b_scale = tl.exp2(b_shift - b_new)
    else:
        b_new = tl.maximum(b_shift, tl.minimum(b_max, _HIGHEST))
        b_p = tl.exp2((b_x - b_new[None, :, None]) * _LOG2E)
        b_scale = tl.exp2((b_shift - b_new) * _LOG2E)
    b_sum = b_sum * b_scale + tl.sum(tl.sum(b_p, axis=2), axis=0)
    if HAS_SMOOTHING:
        b_total += tl.sum(tl.sum(tl.where(b_x > float("-inf"), b_x, 0.0), axis=2), axis=0)
    return b_new, b_sum, b_total


@triton.jit
def sum_of_row(
    p_x, V, LOG2: tl.constexpr, HAS_SMOOTHING: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr
):  # fmt: skip
    """(maximum, sum of exp(x - maximum), sum) of the V logits at p_x, the maximum times log2(e) with LOG2; each lane keeps its own maximum
    and sums, joined once at the end"""
    BLOCK: tl.constexpr = CHUNKS * LANES * VECTOR
    b_shift = tl.full([LANES], _LOWEST, dtype=tl.float32)
    b_sum = tl.zeros([LANES], dtype=tl.float32)
    b_total = tl.zeros([LANES], dtype=tl.float32)
    tail = V // BLOCK * BLOCK  # the full tiles before it need no mask
    for first in range(0, tail, BLOCK):
        o_n, _ = _tile(first, V, CHUNKS, LANES, VECTOR)
        b_x = tl.load(p_x + o_n, eviction_policy="evict_last").to(tl.float32)
        b_shift, b_sum, b_total = _add_tile(b_shift, b_sum, b_total, b_x, LOG2, HAS_SMOOTHING)
    if tail < V:
        o_n, m_n = _tile(tail, V, CHUNKS, LANES, VECTOR)
        b_x = tl.load(p_x + o_n, mask=m_n, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)
        b_shift, b_sum, b_total = _add_tile(b_shift, b_sum, b_total, b_x, LOG2, HAS_SMOOTHING)
    shift = tl.max(b_shift, axis=0)
    b_scale = tl.exp2(b_shift - shift) if LOG2 else tl.exp2((b_shift - shift) * _LOG2E)
    return shift, tl.sum(b_sum * b_scale, axis=0), tl.sum(b_total, axis=0)


@triton.jit
def _scale_of(weight, lse, row_sum, z_loss):
    """Factor of exp2(log2(e) x - shift) in the gradient. Without lse, a float32 of up to 2 eps of error, that the softmax would amplify"""
    return tl.div_rn(weight * (1.0 + 2.0 * z_loss * lse), row_sum)


@jit
def _cross_entropy_fwd(
    logits_ptr, target_ptr, weight_ptr, grad_ptr, loss_ptr, row_ptr, V, ignore_index, z_loss, smoothing,
    HAS_SMOOTHING: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """loss, shift and sum of exp2(log2(e) x - shift) of one row; with grad_ptr also weight * d_x, which may overwrite the logits"""
    BLOCK: tl.constexpr = CHUNKS * LANES * VECTOR
    i_m = tl.program_id(0).to(tl.int64)
    p_x = logits_ptr + i_m * V
    target = tl.load(target_ptr + i_m)
    is_target = target != ignore_index
    index = tl.where(is_target, target, 0)
    x_target = tl.load(p_x + index).to(tl.float32)

    # Phase 1: the row's sum
    shift, row_sum, total = sum_of_row(p_x, V, True, HAS_SMOOTHING, CHUNKS, LANES, VECTOR)
    tail = V // BLOCK * BLOCK  # the full tiles before it need no mask
    lse = (shift + tl.log2(row_sum)) * _LN2

    # Phase 2: the loss of the row
    loss = lse - (1.0 - smoothing) * x_target + z_loss * lse * lse
    if HAS_SMOOTHING:
        loss -= smoothing * total / V
    tl.store(loss_ptr + i_m, tl.where(is_target, loss, 0.0))
    tl.store(row_ptr + 2 * i_m, shift)
    tl.store(row_ptr + 2 * i_m + 1, row_sum)

    # Phase 3: the gradient, from a second read that the cache serves: last tile first, because it was read last
    if grad_ptr is not None:
        dtype: tl.constexpr = grad_ptr.dtype.element_ty
        p_grad = grad_ptr + i_m * V
        weight = tl.load(weight_ptr)
        scale = _scale_of(weight, lse, row_sum, z_loss)
        low = weight * smoothing / V
        if is_target:
            if tail < V:
                o_n, m_n = _tile(tail, V, CHUNKS, LANES, VECTOR)
                b_x = tl.load(p_x + o_n, mask=m_n, other=0.0, eviction_policy="evict_first").to(tl.float32)
                b_grad = tl.exp2(b_x * _LOG2E - shift) * scale - low
                tl.store(p_grad + o_n, cast(b_grad, dtype), mask=m_n)
            for first in range(0, tail, BLOCK):
                o_n, _ = _tile(tail - BLOCK - first, V, CHUNKS, LANES, VECTOR)
                b_x = tl.load(p_x + o_n, eviction_policy="evict_first").to(tl.float32)
                b_grad = tl.exp2(b_x * _LOG2E - shift) * scale - low
                tl.store(p_grad + o_n, cast(b_grad, dtype))
            tl.debug_barrier()  # the target's element is written again: after its tile, by whichever thread
            grad_target = tl.exp2(x_target * _LOG2E - shift) * scale - low - weight * (1.0 - smoothing)
            tl.store(p_grad + index, cast(grad_target, dtype))
        else:
            for first in range(0, V, BLOCK):
                o_n, m_n = _tile(first, V, CHUNKS, LANES, VECTOR)
                tl.store(p_grad + o_n, tl.zeros([CHUNKS, LANES, VECTOR], dtype=dtype), mask=m_n)


@jit
def _cross_entropy_bwd(
    logits_ptr, target_ptr, row_ptr, d_loss_ptr, grad_ptr, V, stride_d, ignore_index, z_loss, smoothing,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """d_x of one tile of one row from its shift and sum"""
    dtype: tl.constexpr = grad_ptr.dtype.element_ty
    i_m = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1).to(tl.int64) * BLOCK
    o_n = first + tl.arange(0, BLOCK)
    m_n = o_n < V
    p_x = logits_ptr + i_m * V
    p_grad = grad_ptr + i_m * V
    target = tl.load(target_ptr + i_m)
    if target != ignore_index:
        shift = tl.load(row_ptr + 2 * i_m)
        row_sum = tl.load(row_ptr + 2 * i_m + 1)
        weight = tl.load(d_loss_ptr + i_m * stride_d)
        scale = _scale_of(weight, (shift + tl.log2(row_sum)) * _LN2, row_sum, z_loss)
        low = weight * smoothing / V
        b_x = tl.load(p_x + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_grad = tl.exp2(b_x * _LOG2E - shift) * scale - low
        tl.store(p_grad + o_n, cast(b_grad, dtype), mask=m_n)
        tl.debug_barrier()
        is_here = (target >= first) & (target < first + BLOCK)
        x_target = tl.load(p_x + target, mask=is_here, other=0.0).to(tl.float32)
        grad_target = tl.exp2(x_target * _LOG2E - shift) * scale - low - weight * (1.0 - smoothing)
        tl.store(p_grad + target, cast(grad_target, dtype), mask=is_here)
    else:
        tl.store(p_grad + o_n, tl.zeros([BLOCK], dtype=dtype), mask=m_n)


@jit
def _scale_rows(x_ptr, scale_ptr, V, stride_s, BLOCK: tl.constexpr):
    """x = x * scale, in place; a scale of one costs no memory traffic"""
    i_m = tl.program_id(0).to(tl.int64)
    scale = tl.load(scale_ptr + i_m * stride_s)
    if scale != 1.0:
        o_n = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        m_n = o_n < V
        b_x = tl.load(x_ptr + i_m * V + o_n, mask=m_n, other=0.0).to(tl.float32) * scale
        tl.store(x_ptr + i_m * V + o_n, cast(b_x, x_ptr.dtype.element_ty), mask=m_n)


@kept
def _forward_for(
    target: Machine, M: int, V: int, dtype: torch.dtype, ignore_index: int, z_loss: float, smoothing: float
) -> tuple[Bound, Memory, Memory]:
    """With the memory of the loss, and of the rows' shifts and sums."""
    config = LaunchConfig.for_row(V, itemsize=dtype.itemsize, warp_size=target.warp_size, smoothing=smoothing != 0.0)
    bound = bind(
        _cross_entropy_fwd, V, ignore_index, z_loss, smoothing, grid=(M,), HAS_SMOOTHING=smoothing != 0.0, CHUNKS=config.chunks,
        LANES=config.lanes, VECTOR=config.vector, num_warps=config.num_warps, enable_fp_fusion=True,
    )  # fmt: skip
    return bound, memory_of(M, dtype=torch.float32), memory_of(M, 2, dtype=torch.float32)


@kept
def _backward_for(
    target: Machine, M: int, V: int, itemsize: int, has_rows: bool, ignore_index: int, z_loss: float, smoothing: float
) -> Bound:
    """has_rows: a gradient for every row, not one for all."""
    config = LaunchConfig.for_row(V, itemsize=itemsize, warp_size=target.warp_size)
    return bind(
        _cross_entropy_bwd, V, int(has_rows), ignore_index, z_loss, smoothing, grid=(M, cdiv(V, config.block)),
        BLOCK=config.block, num_warps=config.num_warps, enable_fp_fusion=True,
    )  # fmt: skip


@kept
def _scale_for(target: Machine, M: int, V: int, itemsize: int, has_rows: bool) -> Bound:
    """has_rows: a scale for every row, not one for all."""
    config = LaunchConfig.for_row(V, itemsize=itemsize, warp_size=target.warp_size)
    return bind(
        _scale_rows, V, int(has_rows), grid=(M, cdiv(V, config.block)), BLOCK=config.block, num_warps=config.num_warps,
        enable_fp_fusion=True,
    )  # fmt: skip


def _launch_fwd_into(
    grad: Tensor | None,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    z_loss: float,
    smoothing: float,
) -> tuple[Tensor, Tensor]:
    M, V = logits.shape
    forward, one, two = _forward_for(machine(logits.device), M, V, logits.dtype, ignore_index, z_loss, smoothing)
    make = maker(logits)
    loss, rows = make(*one), make(*two)
    if M:
        forward.launch(logits, target, weight, grad, loss, rows)
    return loss, rows


def _launch_fwd(
    logits: Tensor, target: Tensor, ignore_index: int, z_loss: float, smoothing: float
) -> tuple[Tensor, Tensor]:
    return _launch_fwd_into(None, logits, target, None, ignore_index, z_loss, smoothing)


def _launch_fwd_in_place(
    logits: Tensor, target: Tensor, weight: Tensor, ignore_index: int, z_loss: float, smoothing: float
) -> Tensor:
    return _launch_fwd_into(logits, logits, target, weight, ignore_index, z_loss, smoothing)[0]


def _launch_bwd(
    logits: Tensor, target: Tensor, rows: Tensor, d_loss: Tensor, ignore_index: int, z_loss: float, smoothing: float
) -> Tensor:
    M, V = logits.shape
    grad = torch.empty_like(logits)
    if M:
        options, has_rows = (ignore_index, z_loss, smoothing), d_loss.numel() > 1
        backward = _backward_for(machine(logits.device), M, V, logits.element_size(), has_rows, *options)
        backward.launch(logits, target, rows, d_loss, grad)
    return grad


def _launch_scale(x: Tensor, scale: Tensor) -> None:
    M, V = x.shape
    if M:
        _scale_for(machine(x.device), M, V, x.element_size(), scale.numel() > 1).launch(x, scale)


_OPTIONS = "int ignore_index, float z_loss, float smoothing"
_forward = register(
    f"cross_entropy(Tensor logits, Tensor target, {_OPTIONS}) -> (Tensor, Tensor)",
    triton=_launch_fwd,
    cpu=cross_entropy_cpu.fwd,
    fake=lambda logits, target, *options: tuple(
        logits.new_empty(shape, dtype=torch.float32) for shape in ((logits.shape[0],), (logits.shape[0], 2))
    ),
)
_forward_in_place = register(
    f"cross_entropy_in_place(Tensor(a!) logits, Tensor target, Tensor weight, {_OPTIONS}) -> Tensor",
    triton=_launch_fwd_in_place,
    cpu=cross_entropy_cpu.fwd_in_place,
    fake=lambda logits, target, weight, *options: logits.new_empty(logits.shape[0], dtype=torch.float32),
)
_backward = register(
    f"cross_entropy_backward(Tensor logits, Tensor target, Tensor rows, Tensor d_loss, {_OPTIONS}) -> Tensor",
    triton=_launch_bwd,
    cpu=cross_entropy_cpu.bwd,
    fake=lambda logits, target, rows, d_loss, *options: torch.empty_like(logits),
)
_scale = register(
    "scale_rows(Tensor(a!) x, Tensor scale) -> ()",
    triton=_launch_scale,
    cpu=cross_entropy_cpu.scale,
    fake=lambda x, scale: None,
)


def _reduce(loss: Tensor, *, weight: Tensor, reduction: str) -> Tensor:
    """The rows' losses [M], or their weighted sum []."""
    return loss if reduction == "none" else (loss.sum() * weight).reshape(())


class _CrossEntropy(OnceFunction):
    @staticmethod
    def forward(ctx, logits: Tensor, target: Tensor, weight: Tensor, reduction: str, options: tuple) -> Tensor:
        loss, rows = _forward(logits, target, *options)
        ctx.save_for_backward(logits, target, rows, weight)
        ctx.options = options
        return _reduce(loss, weight=weight, reduction=reduction)

    @staticmethod
    def backward(ctx, d_loss: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, target, rows, weight = ctx.saved_tensors
        grad = _backward(logits, target, rows, d_loss.reshape(-1) * weight, *ctx.options)
        return grad, None, None, None, None


class _CrossEntropyInPlace(OnceFunction):
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

    logits: [..., V]; target: [...] int64, positions equal to `ignore_index` are ignored. Adds z_loss * lse^2 and
    smooths the target distribution by `label_smoothing`. reduction: "mean" over the counted targets (0 without any),
    "sum", or "none" for [...]. With `inplace`, a needed gradient overwrites the logits, and only one backward may
    follow. Without a gradient, and in float16, the logits do not change.
    Raises ValueError for a target of another shape or dtype and for an unknown reduction.
    """
    if target.shape != logits.shape[:-1] or target.dtype != torch.int64:
        raise ValueError(
            f"cross_entropy: target is {tuple(target.shape)} {target.dtype}; logits {tuple(logits.shape)} need int64 "
            f"{tuple(logits.shape[:-1])}"
        )
    if reduction not in REDUCTIONS:
        raise ValueError(f"cross_entropy: reduction={reduction!r} is unknown; choose one of {', '.join(REDUCTIONS)}")
    if needs_reference():
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
    num_bytes=lambda shape, itemsize: shape[0] * shape[1] * itemsize,
    num_bytes_backward=lambda shape, itemsize: 2 * shape[0] * shape[1] * itemsize,  # out of place, as benchmarks run it
    num_flops=lambda shape: 8 * shape[0] * shape[1],
)  # fmt: skip
