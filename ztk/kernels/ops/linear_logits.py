"""Losses that are sums over tokens, each a function of all logits of its token: only a chunk of them is computed further at a time.

    for each chunk of tokens:   logits = x_c @ weight^T                                    [rows, V]
                                g = d loss / d logits, by autograd over the chunk
                                d_x_c = g @ weight,    d_weight += g^T x_c                 (both float32)

A chunk's loss may keep several copies of its logits, so chunks have a quarter of the bytes of `linear_logprob`. Without gradients, as in an
evaluation, only the loss is computed.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ztk.kernels.launch.functions import OnceFunction
from ztk.kernels.ops.linear_cross_entropy import CHUNK_BYTES, CPU_CHUNK_BYTES, accumulate, chunk_rows, multiply, operand
from ztk.kernels.ops.linear_logprob import Product
from ztk.kernels.shared.spec import compute_dtype

# (logits [n, V] in float32 or float64, which tokens [n] they are of) -> the sum of their losses
LogitLoss = Callable[[Tensor, slice], Tensor]
_PART = 4


def linear_logit_loss(
    x: Tensor,
    weight: Tensor,
    *,
    loss_of: LogitLoss,
    chunk_bytes: int | None = None,
    product: Product = torch.nn.functional.linear,
) -> Tensor:
    """The sum over tokens of a loss of x @ weight^T, which is never there in full; gradients for x and weight, computed at once.

    x: [T, H]; weight: [V, H], of x's dtype. loss_of: called once per chunk. product: computes the logits, as the model's head does. At most
    `chunk_bytes` of float32 logits exist at a time (128 MiB; 8 MiB on a CPU). Returns float32 [], float64 for float64.

    Raises:
        ValueError: for other shapes and dtypes.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ValueError(
            f"linear_logit_loss: x {tuple(x.shape)} {x.dtype} and weight {tuple(weight.shape)} {weight.dtype} must be [T, H] and [V, H] of the "
            "same dtype"
        )
    rows = _rows(len(x), vocabulary=len(weight), like=x, chunk_bytes=chunk_bytes)
    if torch.is_grad_enabled():
        return _LinearLogitLoss.apply(x.contiguous(), weight.contiguous(), loss_of, rows, product)
    parts = [loss_of(product(x[cut], weight).to(compute_dtype(x)), cut) for cut in _cuts(len(x), rows=rows)]
    return torch.stack(parts).sum()


def logit_loss(logits: Tensor, *, loss_of: LogitLoss, chunk_bytes: int | None = None) -> Tensor:
    """The same over logits [T, V] that exist in full: memory for one gradient of them, and for the temporaries of a chunk."""
    rows = _rows(len(logits), vocabulary=logits.shape[1], like=logits, chunk_bytes=chunk_bytes)
    if torch.is_grad_enabled() and logits.requires_grad:
        return _LogitLoss.apply(logits, loss_of, rows)
    parts = [loss_of(logits[cut].to(compute_dtype(logits)), cut) for cut in _cuts(len(logits), rows=rows)]
    return torch.stack(parts).sum()


class _LinearLogitLoss(OnceFunction):
    INSTEAD = "Compute the loss from the logits"

    @staticmethod
    def forward(ctx, x, weight, loss_of, rows, product):
        d_x = torch.empty_like(x, dtype=compute_dtype(x))
        d_weight = torch.zeros_like(weight, dtype=compute_dtype(x))
        total = torch.zeros((), dtype=compute_dtype(x), device=x.device)
        for cut in _cuts(len(x), rows=rows):
            loss, g = _with_gradient(product(x[cut], weight), loss_of=loss_of, cut=cut)
            g = operand(g.to(x.dtype))
            multiply(g, operand(weight), out=d_x[cut])
            accumulate(d_weight, g=g, x=operand(x[cut]))
            total += loss
        ctx.save_for_backward(d_x, d_weight)
        ctx.dtypes = (x.dtype, weight.dtype)
        return total

    @staticmethod
    def backward(ctx, d_loss):
        scaled = ((d_loss * d).to(dtype) for d, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True))
        return *scaled, None, None, None


class _LogitLoss(OnceFunction):
    INSTEAD = "Compute the loss from the logits"

    @staticmethod
    def forward(ctx, logits, loss_of, rows):
        gradient = torch.empty_like(logits)
        total = torch.zeros((), dtype=compute_dtype(logits), device=logits.device)
        for cut in _cuts(len(logits), rows=rows):
            loss, gradient[cut] = _with_gradient(logits[cut], loss_of=loss_of, cut=cut)
            total += loss
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx, d_loss):
        (gradient,) = ctx.saved_tensors
        return (d_loss * gradient).to(gradient.dtype), None, None


def _with_gradient(logits: Tensor, *, loss_of: LogitLoss, cut: slice) -> tuple[Tensor, Tensor]:
    """The loss of a chunk of logits and its gradient, in float32 or float64."""
    leaf = logits.detach().to(compute_dtype(logits)).requires_grad_()
    with torch.enable_grad():
        loss = loss_of(leaf, cut)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


def _cuts(tokens: int, *, rows: int) -> Iterator[slice]:
    yield from (slice(start, start + rows) for start in range(0, tokens, rows))


def _rows(tokens: int, *, vocabulary: int, like: Tensor, chunk_bytes: int | None) -> int:
    if chunk_bytes is None:
        chunk_bytes = (CPU_CHUNK_BYTES if like.device.type == "cpu" else CHUNK_BYTES) // _PART
    itemsize = compute_dtype(like).itemsize
    return chunk_rows(tokens=tokens, vocabulary=vocabulary, itemsize=itemsize, chunk_bytes=chunk_bytes)
