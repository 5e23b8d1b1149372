"""Differentiable linear functions that communicate: the backward of one is another one.

Gradients have the dtype of x.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ztk.kernels.launch.functions import Function, is_transformed

LinearMap = Callable[[Tensor], Tensor]


def through(x: Tensor, *, forward: LinearMap, backward: LinearMap) -> Tensor:
    """Returns forward(x), in the shape that `forward` returns. The gradient with respect to x is backward(gradient), in x's shape.

    Both must be linear, and `backward` the adjoint of `forward`. Derivatives of any order are then correct: a double backward calls
    `forward` again. Transforms of `torch.func` and forward-mode differentiation work; `torch.vmap` calls the functions once per element.
    """
    return (_Transformed if is_transformed() else _Through).apply(x, forward, backward)


class _Through(Function):
    @staticmethod
    def forward(ctx, x: Tensor, forward: LinearMap, backward: LinearMap) -> Tensor:
        ctx.maps = forward, backward
        return forward(x)

    @staticmethod
    def backward(ctx, d_out: Tensor) -> tuple[Tensor, None, None]:
        forward, backward = ctx.maps
        return through(d_out, forward=backward, backward=forward), None, None


class _Transformed(torch.autograd.Function):
    """`_Through` with rules for transforms. Its `apply` takes ten microseconds longer."""

    @staticmethod
    def forward(x: Tensor, forward: LinearMap, backward: LinearMap) -> Tensor:
        return forward(x)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: Tensor) -> None:
        _, *ctx.maps = inputs

    @staticmethod
    def backward(ctx, d_out: Tensor) -> tuple[Tensor, None, None]:
        forward, backward = ctx.maps
        return through(d_out, forward=backward, backward=forward), None, None

    @staticmethod
    def jvp(ctx, tangent: Tensor, *_: None) -> Tensor:
        forward, backward = ctx.maps
        return through(tangent, forward=forward, backward=backward)

    @staticmethod
    def vmap(info, in_dims: tuple, x: Tensor, forward: LinearMap, backward: LinearMap) -> tuple[Tensor, int]:
        rows = [through(row, forward=forward, backward=backward) for row in x.unbind(in_dims[0])]
        return torch.stack(rows), 0
