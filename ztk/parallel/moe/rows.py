"""Rows of tokens in the order of slots, differentiable without atomics.

Results have the dtype of x; orders and positions are int64.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ztk.kernels.ops.moe_combine import combine


def gather_rows(x: Tensor, *, order: Tensor, position: Tensor) -> Tensor:
    """x [T, C] -> [S, C]: slot s is row order[s] // k, with `order` [S] and `position` [T, k] of `ztk.kernels.Slots`.

    A row's gradient is the sum of its slots' gradients, in the order of choices.
    """
    return _GatherRows.apply(x, order, position)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, position: Tensor) -> Tensor:
        ctx.save_for_backward(position)
        return x.index_select(0, order // position.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, d_rows: Tensor) -> tuple[Tensor, None, None]:
        (position,) = ctx.saved_tensors
        return combine(d_rows.contiguous(), None, position), None, None
