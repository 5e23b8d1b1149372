"""Cross entropy on CPU tensors; shapes, dtypes, options and results are as in `ops/cross_entropy.py`."""

import math

import torch
from torch import Tensor

from ztk.kernels.shared.cpu import rows_per_piece, scaled_float32, scratch

LOG2E = math.log2(math.e)
SMALLEST_PROBABILITY = 1e-30  # far above float32's subnormals, whose logarithms are coarse


def _rows(
    logits: Tensor, target: Tensor, *, ignore_index: int, z_loss: float, smoothing: float, grad: Tensor | None,
    weight: float | Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes loss and lse per row, and weight * d_x into `grad` if given, in pieces of full rows.

    torch's softmax is 2.5 times as fast as its exp. So the lse of a row comes from the target's probability, lse = x[target] - log(p[target]),
    unless that probability is too small.
    """
    M, V = logits.shape
    loss, lse = (torch.empty(M, dtype=torch.float32, device="cpu") for _ in range(2))
    is_target = target != ignore_index
    index = torch.where(is_target, target, 0)
    rows = 4 * rows_per_piece(V)
    for start in range(0, M, rows):
        cut = slice(start, start + rows)
        x = scaled_float32(logits[cut].view(-1), scale=1.0, slot=0).view(-1, V)
        p = torch._softmax(x, 1, False, out=scratch(x.numel(), slot=1).view(-1, V))
        column = index[cut, None]
        x_target, p_target = x.gather(1, column)[:, 0], p.gather(1, column)[:, 0]
        if p_target.min() > SMALLEST_PROBABILITY:
            row_lse = torch.sub(x_target, p_target.log_(), out=lse[cut])
        else:
            row_lse = lse[cut].copy_(torch.logsumexp(x, dim=1))
        row_loss = torch.sub(row_lse, x_target, alpha=1 - smoothing, out=loss[cut])
        if smoothing:
            row_loss.sub_(x.mean(dim=1), alpha=smoothing)
        if z_loss:
            row_loss.addcmul_(row_lse, row_lse, value=z_loss)
        if grad is None:
            continue
        w = is_target[cut] * (weight if isinstance(weight, float) else weight[cut])
        scale = w * (1 + 2 * z_loss * row_lse) if z_loss else w
        target_grad = grad[cut] if grad.dtype == torch.float32 else p
        torch.mul(p, scale[:, None], out=target_grad)
        if smoothing:
            target_grad.sub_((w * (smoothing / V))[:, None])
        target_grad.scatter_add_(1, column, (w * (smoothing - 1))[:, None])
        if target_grad is p:
            grad[cut].copy_(p)
    loss.mul_(is_target)
    return loss, lse


def fwd(logits: Tensor, target: Tensor, ignore_index: int, z_loss: float, smoothing: float) -> tuple[Tensor, Tensor]:
    """Loss [M], and shift and sum [M, 2] of each row: log2(e) lse and 1, which `bwd` does not read."""
    loss, lse = _rows(
        logits, target, ignore_index=ignore_index, z_loss=z_loss, smoothing=smoothing, grad=None, weight=1.0
    )
    return loss, torch.stack((lse * LOG2E, torch.ones_like(lse)), dim=1)


def fwd_in_place(
    logits: Tensor, target: Tensor, weight: Tensor, ignore_index: int, z_loss: float, smoothing: float
) -> Tensor:
    """Loss of each row; the gradient replaces the logits."""
    return _rows(
        logits, target, ignore_index=ignore_index, z_loss=z_loss, smoothing=smoothing, grad=logits, weight=weight.item()
    )[0]


def bwd(
    logits: Tensor, target: Tensor, rows: Tensor, d_loss: Tensor, ignore_index: int, z_loss: float, smoothing: float
) -> Tensor:
    """The gradient of the logits."""
    grad = torch.empty_like(logits)
    weight = d_loss if d_loss.numel() > 1 else d_loss.item()
    _rows(logits, target, ignore_index=ignore_index, z_loss=z_loss, smoothing=smoothing, grad=grad, weight=weight)
    return grad


def scale(x: Tensor, scale: Tensor) -> None:
    """X times its rows' scale, in place."""
    if scale.numel() > 1:
        x.copy_(x.float() * scale[:, None])
    elif scale.item() != 1.0:
        x.mul_(scale.item())
