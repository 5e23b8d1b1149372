"""Cross entropy of x @ weight^T without ever holding the logits: chunks of tokens, gradients computed in forward.

    for each chunk of tokens:   logits = x_c @ weight^T                                   [rows, V], reused
                                loss_c, g = cross entropy and its gradient, over the logits
                                d_x_c = g @ weight,    d_weight += g^T x_c  (both float32)
    backward:                   d_x, d_weight times d_loss / number of targets

6 T H V floating point operations for forward and backward together, nothing recomputed, against 8 T H V when backward
rebuilds the logits. The three products are the vendor's; between them the chunk is read and written once by the kernel of
`cross_entropy`. The chunk is as large as `chunk_bytes` allows, because a product with few rows cannot fill the machine: at
V = 131072, 512 MiB are 2048 rows. Of the factor 1 / targets, which would underflow in float16, g gets the mantissa and
backward the power of two and d_loss, in the cast from float32 that rounds the gradients, once. No host synchronisation.

Memory: the chunk, d_x and d_weight in float32. Dao et al. and Hsu et al. use the same idea with small chunks:
https://arxiv.org/abs/2410.10989
"""

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ztk.kernels.launch.functions import OnceFunction
from ztk.kernels.launch.library import needs_reference, register
from ztk.kernels.ops.cast_copy import cast_copy
from ztk.kernels.ops.cross_entropy import cross_entropy_reference
from ztk.kernels.shared.spec import OpSpec

CHUNK_BYTES = 512 << 20
CPU_CHUNK_BYTES = 32 << 20
ROW_MULTIPLE = 128  # rows of a product's tile


def chunk_rows(*, tokens: int, vocabulary: int, itemsize: int, chunk_bytes: int) -> int:
    """Rows of logits that fit in `chunk_bytes`: chunks of one size, a multiple of 128 when there is more than one."""
    fit = max(1, chunk_bytes // (vocabulary * itemsize))
    if fit >= tokens:
        return max(1, tokens)
    chunks = -(-tokens // fit)
    rows = -(-tokens // chunks)
    full = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
    return full if full <= fit else min(fit, rows)


def operand(x: Tensor) -> Tensor:
    """x, of any shape, as it enters a product: float16 on a CPU in float32, which is seven times as fast there; else as it is."""
    return x.float() if x.dtype == torch.float16 and not x.is_cuda else x


def _logits(x: Tensor, weight: Tensor, *, out: Tensor) -> Tensor:
    """x weight^T into `out`."""
    return torch.mm(x, weight.T, out=out) if out.dtype == x.dtype else out.copy_(x @ weight.T)


def multiply(g: Tensor, weight: Tensor, *, out: Tensor) -> None:
    """g [n, V] weight [V, H], of one dtype, into the float32 `out` [n, H]; a CPU rounds a product of bfloat16 to bfloat16 first."""
    if g.dtype == torch.float32:
        torch.mm(g, weight, out=out)
    elif g.is_cuda:
        torch.mm(g, weight, out_dtype=torch.float32, out=out)
    else:
        out.copy_(g @ weight)


def accumulate(d_weight: Tensor, *, g: Tensor, x: Tensor) -> None:
    """d_weight [V, H] += g^T x, g [n, V] and x [n, H] of one dtype, summed in float32; a CPU rounds each chunk's product of bfloat16 first."""
    if g.dtype == torch.float32:
        d_weight.addmm_(g.T, x)
    elif g.is_cuda:
        torch.addmm(d_weight, g.T, x, out_dtype=torch.float32, out=d_weight)
    else:
        d_weight.add_(g.T @ x)


def _run(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    row_weight: Tensor,
    logits: Tensor,
    ignore_index: int,
    z_loss: float,
    smoothing: float,
    with_gradients: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss per token [T], d_x [T, H], d_weight [V, H]), float32; the gradients times `row_weight` [1], or empty. logits: [rows, V], memory
    for a chunk."""
    (T, H), (rows, V) = x.shape, logits.shape
    options = (ignore_index, z_loss, smoothing)
    loss = torch.empty(T, dtype=torch.float32, device=x.device)
    d_x = torch.empty((T if with_gradients else 0, H), dtype=torch.float32, device=x.device)
    d_weight = torch.zeros((V, H) if with_gradients else (0, H), dtype=torch.float32, device=x.device)
    weight = operand(weight)
    for start in range(0, T, rows):
        cut = slice(start, start + rows)
        x_cut = operand(x[cut])
        g = _logits(x_cut, weight, out=logits[: min(rows, T - start)])
        if with_gradients:
            loss[cut] = torch.ops.ztk.cross_entropy_in_place(g, target[cut], row_weight, *options)
            g = operand(g)
            multiply(g, weight, out=d_x[cut])
            accumulate(d_weight, g=g, x=x_cut)
        else:
            loss[cut] = torch.ops.ztk.cross_entropy(g, target[cut], *options)[0]
    return loss, d_x, d_weight


def _fake(x, weight, target, row_weight, logits, ignore_index, z_loss, smoothing, with_gradients):
    (T, H), V = x.shape, weight.shape[0]
    shapes = (T,), (T if with_gradients else 0, H), (V if with_gradients else 0, H)
    return tuple(x.new_empty(shape, dtype=torch.float32) for shape in shapes)


_op = register(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor target, Tensor row_weight, Tensor(a!) logits, int ignore_index, "
    "float z_loss, float smoothing, bool with_gradients) -> (Tensor, Tensor, Tensor)",
    triton=_run,  # the kernel inside is cross_entropy's, which dispatches by itself
    cpu=_run,
    fake=_fake,
)


@register_flop_formula(torch.ops.ztk.linear_cross_entropy)
def _count_operations(x: torch.Size, weight: torch.Size, *args, **kwargs) -> int:
    """For torch's FLOP counter and for plans: the logits, and with gradients two products more."""
    return 2 * x.numel() * weight[0] * (3 if args[-1] else 1)


class _LinearCrossEntropy(OnceFunction):
    @staticmethod
    def forward(ctx, x, weight, target, factor, rows, options, with_gradients):
        logits = torch.empty(min(rows, x.shape[0]), weight.shape[0], dtype=x.dtype, device=x.device)
        mantissa, exponent = torch.frexp(factor.reshape(1))
        loss, d_x, d_weight = _op(x, weight, target, mantissa, logits, *options, with_gradients)
        ctx.save_for_backward(d_x, d_weight, torch.ldexp(torch.ones_like(mantissa), exponent))
        ctx.dtype = x.dtype
        return (loss.sum() * factor).reshape(())

    @staticmethod
    def backward(ctx, d_loss):
        d_x, d_weight, power = ctx.saved_tensors
        factor = power * d_loss
        scaled = []
        for d in (d_x, d_weight):
            out = torch.empty_like(d, dtype=ctx.dtype)
            cast_copy(d.view(-1), out=out.view(-1), scale=factor)
            scaled.append(out)
        return *scaled, None, None, None, None, None


def bytes_kept(x: Tensor, *, weight: Tensor, with_gradients: bool = True) -> int:
    """Bytes that `linear_cross_entropy` allocates for x [..., H] and weight [V, H]: the largest chunk, and the gradients in float32."""
    rows, (V, H) = x.numel() // weight.shape[1], weight.shape
    gradients = 4 * H * (rows + V) if with_gradients else 0
    return gradients + (CPU_CHUNK_BYTES if x.device.type == "cpu" else CHUNK_BYTES)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    chunk_bytes: int | None = None,
) -> Tensor:
    """The cross entropy of the logits x @ weight^T; gradients for x and weight.

    x: [..., H]; weight: [V, H], of x's dtype; target: int64 [...]. `reduction` "mean" (over targets that are not
    `ignore_index`) or "sum". At most `chunk_bytes` of logits exist at a time (512 MiB; 32 MiB on CPU). Returns float32 [].
    Raises ValueError for other shapes and dtypes and for an unknown reduction.
    """
    if weight.dim() != 2 or x.shape[-1] != weight.shape[1] or x.shape[:-1] != target.shape or x.dtype != weight.dtype:
        raise ValueError(
            f"linear_cross_entropy: x {tuple(x.shape)} {x.dtype}, weight {tuple(weight.shape)} {weight.dtype} and target "
            f"{tuple(target.shape)} must be [..., H], [V, H] of the same dtype, and [...]"
        )
    if reduction not in ("mean", "sum"):
        raise ValueError(f"linear_cross_entropy: reduction={reduction!r} is unknown; choose mean or sum")
    options = {"ignore_index": ignore_index, "z_loss": z_loss, "label_smoothing": label_smoothing}
    if needs_reference():
        return linear_cross_entropy_reference(x, weight, target, reduction=reduction, **options)
    rows, target = x.reshape(-1, x.shape[-1]).contiguous(), target.reshape(-1).contiguous()
    if chunk_bytes is None:
        chunk_bytes = CPU_CHUNK_BYTES if x.device.type == "cpu" else CHUNK_BYTES
    size = chunk_rows(
        tokens=rows.shape[0], vocabulary=weight.shape[0], itemsize=x.element_size(), chunk_bytes=chunk_bytes
    )
    factor = torch.ones((), device=x.device)
    if reduction == "mean":
        factor = (target != ignore_index).sum().clamp_min(1).float().reciprocal()
    with_gradients = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    numbers = (ignore_index, z_loss, label_smoothing)
    return _LinearCrossEntropy.apply(rows, weight.contiguous(), target, factor, size, numbers, with_gradients)


def linear_cross_entropy_reference(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    chunk_bytes: int | None = None,
) -> Tensor:
    """`cross_entropy_reference` of the full logits, in float32."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    logits = x.to(dtype) @ weight.to(dtype).T
    return cross_entropy_reference(
        logits, target, ignore_index=ignore_index, z_loss=z_loss, label_smoothing=label_smoothing, reduction=reduction
    )


def _eager(x: Tensor, weight: Tensor, target: Tensor, *, chunk_bytes: int | None = None, **options) -> Tensor:
    """The 16-bit formulation: logits in x's dtype, the loss in float32."""
    return cross_entropy_reference(torch.nn.functional.linear(x, weight).float(), target, **options)


def _rounded(loss):
    """The loss in x's dtype, for comparisons: its error is the error of the rounded logits."""

    def run(x: Tensor, weight: Tensor, target: Tensor, **options) -> Tensor:
        return loss(x, weight, target, **options).to(x.dtype)

    return run


def _make_inputs(
    shape, *, dtype, device, reduction="mean", z_loss=0.0, label_smoothing=0.0, chunk_bytes=4096
) -> dict[str, object]:
    T, H, V = shape
    target = torch.randint(0, V, (T,), device=device)
    target[T // 2] = -100
    return {
        "x": torch.randn(T, H, device=device).to(dtype),
        "weight": (torch.randn(V, H, device=device) * H**-0.5).to(dtype),
        "target": target,
        "reduction": reduction,
        "z_loss": z_loss,
        "label_smoothing": label_smoothing,
        "chunk_bytes": chunk_bytes,
    }


SPEC = OpSpec(
    name="linear_cross_entropy",
    op=_rounded(linear_cross_entropy),
    reference=_rounded(linear_cross_entropy_reference),
    eager=_rounded(_eager),
    make_inputs=_make_inputs,
    differentiable=("x", "weight"),
    small_shapes=((3, 8, 11), (20, 24, 130), (40, 16, 257)),
    bench_shapes=((8192, 4096, 131072), (8192, 2048, 32000)),
    variants=({}, {"reduction": "sum", "z_loss": 1e-3}, {"label_smoothing": 0.1}),
    num_bytes=lambda shape, itemsize: 6 * shape[0] * shape[2] * itemsize,  # five products and passes touch the chunk
    num_flops=lambda shape: 6 * shape[0] * shape[1] * shape[2],
    tolerance_ulps=4.0,  # the logits are rounded to the input's dtype
)
