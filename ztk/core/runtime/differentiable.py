"""Differentiable linear functions that communicate: the backward of one is another one.

Gradients have the dtype of x.
"""

from collections.abc import Callable

import torch
from torch import Tensor

LinearMap = Callable[[Tensor], Tensor]


def through(x: Tensor, *, forward: LinearMap, backward: LinearMap) -> Tensor:
    """Returns forward(x), in the shape that `forward` returns. The gradient with respect to x is backward(gradient), in x's shape.

    Both must be linear, and `backward` the adjoint of `forward`. Derivatives of any order are then correct: a double backward calls
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
