"""Gradients of weights that are computed later than those of inputs.

In a backward a linear layer computes two products: the gradient of its input, for which the layer before waits, and that of its weight, for
which nobody waits before the optimizer steps. Zero-bubble pipelines put the second off. What it needs, the input and the
gradient of the output, is kept until then; nothing is computed twice, and the weight itself is not read again.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ztk.nn.linear import Linear, linear, weight_gradient


class DeferredGradients:
    """While `collecting` is a list, backwards of the layers attached to this object put their weights' part into it.

    A module of another kind takes part by a method `defer_weight_gradients(deferred)`; in its backward, while `deferred.is_active`, it
    calls `deferred.put_off(parameter, product)` and returns no gradient for `parameter`. Modules that do neither compute all
    gradients at once, which is right too.
    """

    def __init__(self) -> None:
        self.collecting: list[tuple[nn.Parameter, Callable[[], Tensor]]] | None = None

    @property
    def is_active(self) -> bool:
        return self.collecting is not None

    def put_off(self, parameter: nn.Parameter, product: Callable[[], Tensor]) -> None:
        """`product()` will be `parameter`'s gradient."""
        self.collecting.append((parameter, product))

    def attach(self, model: nn.Module) -> None:
        """Makes the linear layers in `model` defer, and whoever else can."""
        for module in model.modules():
            if hasattr(module, "defer_weight_gradients"):
                module.defer_weight_gradients(self)
            elif isinstance(module, nn.Linear) and type(module).forward in (nn.Linear.forward, Linear.forward):
                module.forward = functools.partial(self._forward, module)

    def _forward(self, module: nn.Linear, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
            return type(module).forward(module, x)
        product = _own_product if type(module).forward is Linear.forward else F.linear
        return _Deferring.apply(x, module.weight, module.bias, product, self)


@torch.no_grad()
def finish(collected: list[tuple[nn.Parameter, Callable[[], Tensor]]]) -> None:
    """Computes what was put off and gives every parameter its gradient, the sum of its uses, as a backward would."""
    uses: dict[nn.Parameter, list[Callable[[], Tensor]]] = {}
    for parameter, product in collected:
        uses.setdefault(parameter, []).append(product)
    collected.clear()
    for parameter, products in uses.items():
        gradient = products.pop(0)()
        while products:  # popped, so that what a product needs is free when it is done
            gradient += products.pop(0)()
        torch.autograd.backward([parameter], [gradient])


def _own_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear(x, weight=weight, bias=bias)


class _Deferring(torch.autograd.Function):
    """x W^T + b whose backward may leave the weight's gradient for later. product: of the layer's own kind, like `F.linear`."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: nn.Parameter, bias: Tensor | None, product: Callable, deferred: DeferredGradients
    ) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
        ctx.parameter, ctx.product, ctx.deferred = weight, product, deferred
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx, d_out: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        d_x = ctx.product(d_out, weight.t()) if ctx.needs_input_grad[0] else None
        d_bias = d_out.reshape(-1, d_out.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        if not ctx.needs_input_grad[1]:
            return d_x, None, d_bias, None, None
        gradient = weight_gradient if ctx.product is _own_product else _plain_weight_gradient
        later = functools.partial(gradient, d_out, x=x)
        if ctx.deferred.is_active and isinstance(ctx.parameter, nn.Parameter):
            ctx.deferred.put_off(ctx.parameter, later)
            return d_x, None, d_bias, None, None
        return d_x, later(), d_bias, None, None


def _plain_weight_gradient(d_out: Tensor, *, x: Tensor) -> Tensor:
    """d_out^T x, summed over all positions: [out, in]."""
    return F.linear(d_out.reshape(-1, d_out.shape[-1]).t(), x.reshape(-1, x.shape[-1]).t())
