"""Computes weight gradients later than input gradients.

The backward of a linear layer computes two products: the gradient of its input, for which the previous layer waits, and the gradient of its
weight, which is first needed by the optimizer. Zero-bubble pipelines defer the second. The input and the gradient of the output are
kept until then; nothing is computed twice, and the weight itself is not read again. Gradients have the dtype of their parameters.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ztk.kernels.launch.functions import OnceFunction
from ztk.nn.float8 import Float8Product
from ztk.nn.linear import Linear, linear, weight_gradient


class DeferredGradients:
    """While `collecting` is a list, backwards of the attached layers append their weights' products to it instead of computing them.

    A module of another kind takes part with a method `defer_weight_gradients(deferred)`; in its backward, while `deferred.is_active`, it
    calls `deferred.defer(parameter, product=product)` and returns no gradient for `parameter`. All other modules compute their gradients
    at once, which is correct too.
    """

    def __init__(self) -> None:
        self.collecting: list[tuple[nn.Parameter, Callable[[], Tensor]]] | None = None

    @property
    def is_active(self) -> bool:
        """Whether backwards currently defer weight gradients."""
        return self.collecting is not None

    def defer(self, parameter: nn.Parameter, *, product: Callable[[], Tensor]) -> None:
        """Stores `product`. `product()` returns a part of `parameter`'s gradient, in its shape."""
        assert self.collecting is not None
        self.collecting.append((parameter, product))

    def attach(self, model: nn.Module) -> None:
        """Makes the linear layers in `model`, and modules with `defer_weight_gradients`, defer their weight gradients. Layers whose forward
        was replaced, for example by adapters, are not changed."""
        for module in model.modules():
            if hasattr(module, "defer_weight_gradients"):
                # pyrefly: ignore[not-callable]  # nn.Module types every attribute as Tensor or Module
                module.defer_weight_gradients(self)
            elif isinstance(product := getattr(module, "product", None), Float8Product):
                module.product = replace(product, deferred=self)
            elif "forward" in vars(module):
                continue
            elif isinstance(module, nn.Linear) and type(module).forward in (nn.Linear.forward, Linear.forward):
                module.forward = functools.partial(self._forward, module)

    def _forward(self, module: nn.Linear, x: Tensor) -> Tensor:
        device = x.device.type
        is_autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        if not torch.is_grad_enabled() or is_autocast:
            return type(module).forward(module, x)
        product = _own_product if type(module).forward is Linear.forward else F.linear
        return _Deferring.apply(x, module.weight, module.bias, product, self)


@torch.no_grad()
def finish(collected: list[tuple[nn.Parameter, Callable[[], Tensor]]]) -> None:
    """Computes the deferred products, of their parameters' shapes, and accumulates each parameter's sum as a backward would."""
    uses: dict[nn.Parameter, list[Callable[[], Tensor]]] = {}
    for parameter, product in collected:
        uses.setdefault(parameter, []).append(product)
    collected.clear()
    for parameter, products in uses.items():
        gradient = products.pop(0)()
        while products:  # popped, so that the tensors of a product are freed after it
            gradient += products.pop(0)()
        torch.autograd.backward([parameter], [gradient])


def _own_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear(x, weight=weight, bias=bias)


class _Deferring(OnceFunction):
    """x W^T + b whose backward may defer the weight's gradient. product: the layer's own, called like `F.linear`."""

    INSTEAD = "Choose another schedule than topology.schedule=zero_bubble, which defers gradients of weights"

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
            ctx.deferred.defer(ctx.parameter, product=later)
            return d_x, None, d_bias, None, None
        return d_x, later(), d_bias, None, None


def _plain_weight_gradient(d_out: Tensor, *, x: Tensor) -> Tensor:
    """d_out^T x, summed over all positions: [out, in]."""
    return F.linear(d_out.reshape(-1, d_out.shape[-1]).t(), x.reshape(-1, x.shape[-1]).t())
