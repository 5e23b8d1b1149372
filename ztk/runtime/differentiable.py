"""Linear functions that talk to other ranks and that gradients flow through: the backward of one is another."""

from collections.abc import Callable

import torch
from torch import Tensor

LinearMap = Callable[[Tensor], Tensor]


def through(x: Tensor, *, forward: LinearMap, backward: LinearMap) -> Tensor:
    """forward(x), whose gradient with respect to x is backward(gradient).

    Both are linear and `backward` is the adjoint of `forward`, so derivatives of any order are right: a gradient's gradient goes through
    `forward` again.
    """
    return _Through.apply(x, forward, backward)


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, forward: LinearMap, backward: LinearMap) -> Tensor:
        ctx.maps = forward, backward
        return forward(x)

    @staticmethod
    def backward(ctx, d_out: Tensor) -> tuple[Tensor, None, None]:
        forward, backward = ctx.maps
        return through(d_out, forward=backward, backward=forward), None, None
