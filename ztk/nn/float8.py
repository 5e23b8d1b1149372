"""Linear layers that multiply in float8, forward and backward. See [Note: Float8 numerics].

Shapes: M positions, N outputs, K inputs. The three products of a layer, each of two float8 matrices with a scale per row, unless a recipe
keeps the last one in 16 bits:

    output              [M, N] = x [M, K] by rows      weight [N, K] by rows
    gradient of x       [M, K] = d_out * scale of the weight's row [M, N] by rows      the weight's codes [N, K]
    gradient of weight  [N, K] = d_out [M, N] by columns      x [M, K] by columns

Results are bfloat16, as are inputs and weights.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ztk.core.policies.precision import Float8Recipe
from ztk.core.precision.float8 import CODES, MULTIPLE, quantise_columns, quantise_rows, scaled_product, turned
from ztk.core.runtime.gradient_places import place_offered
from ztk.core.runtime.input_gradients import taker_of
from ztk.core.runtime.own_forward import has_own_forward
from ztk.kernels.launch.functions import Function
from ztk.nn.linear import Linear, weight_gradient

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_EXPERTS, _ADAPTERS = "experts", ("lora_A", "lora_B")  # names of modules whose layers stay in 16 bits


class Deferred(Protocol):
    """Collects weight gradients that are computed later. `ztk.nn.deferred.DeferredGradients` is one."""

    @property
    def is_active(self) -> bool: ...

    def defer(self, parameter: nn.Parameter, *, product: Callable[[], Tensor]) -> None:
        """Stores `product`, which returns a part of the gradient of `parameter`, in its shape."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Float8Product:
    """The product of a `Linear` in float8, called like `ztk.nn.linear.linear`. deferred: may take weight gradients."""

    recipe: Float8Recipe
    deferred: Deferred | None = None

    @property
    def gradient_codes(self) -> torch.dtype:
        """The float8 format of gradients."""
        return torch.float8_e5m2 if self.recipe is Float8Recipe.rowwise_e5m2 else CODES

    def __call__(self, x: Tensor, *, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] times weight [N, K] transposed, plus bias [N]: [..., N]."""
        if not x.numel():
            return F.linear(x, weight, bias)
        out = _Float8Linear.apply(x, weight, self)
        return out if bias is None else out + bias

    def weight_gradient(self, d_out: Tensor, *, x: Tensor, out: Tensor | None = None) -> Tensor:
        """d_out [..., N], x [..., K] -> [N, K], in `out` if given."""
        d_out, x = _rows(d_out), _rows(x)
        if self.recipe is Float8Recipe.rowwise_with_gw_hp:
            return weight_gradient(d_out, x=x) if out is None else torch.mm(d_out.t(), x, out=out)
        (a, scales_a), (b, scales_b) = quantise_columns(d_out, dtype=self.gradient_codes), quantise_columns(x)
        return scaled_product(a, b=b, scales=(scales_a, scales_b), out=out)


class _Float8Linear(Function):
    """x W^T. Saves x and the weight in 16 bits, and only if the backward reads them."""

    INSTEAD = "Use precision=bf16 or fp32"

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, product: Float8Product) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
        ctx.parameter, ctx.product = weight if isinstance(weight, nn.Parameter) else None, product
        is_compiling = torch.compiler.is_compiling()
        ctx.place = None if is_compiling or x.device.type == "cpu" else place_offered(weight)
        ctx.take = None if is_compiling else taker_of(x)
        (a, scales_a), (b, scales_b) = quantise_rows(_rows(x)), quantise_rows(weight)
        out = scaled_product(a, b=b, scales=(scales_a, scales_b), is_fast=True)
        return out.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, d_out: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        again = torch.is_grad_enabled()  # this backward will be differentiated, and codes have no gradient
        d_x = d_weight = None
        if ctx.needs_input_grad[0]:
            if again:
                d_x = d_out @ weight
            else:
                d_x = _input_gradient(_rows(d_out), weight=weight, dtype=ctx.product.gradient_codes)
                d_x = d_x.view(*d_out.shape[:-1], -1)
            d_x = d_x if again or ctx.take is None else ctx.take(d_x)
        if not ctx.needs_input_grad[1]:
            return d_x, None, None
        if again:
            return d_x, _rows(d_out).t() @ _rows(x), None
        deferred = ctx.product.deferred
        if deferred is not None and deferred.is_active and ctx.parameter is not None:
            deferred.defer(ctx.parameter, product=partial(ctx.product.weight_gradient, d_out, x=x))
            return d_x, None, None
        place = None if ctx.place is None else ctx.place()
        d_weight = ctx.product.weight_gradient(d_out, x=x, out=place)
        return d_x, d_weight, None


def _input_gradient(d_out: Tensor, *, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """d_out [M, N], weight [N, K] -> [M, K]. dtype: float8 format of the gradient."""
    codes, scales = quantise_rows(weight)
    a, scales_a = quantise_rows(d_out * scales.t().to(d_out.dtype), dtype=dtype)
    return scaled_product(a, b=turned(codes), scales=(scales_a, scales.new_ones(weight.shape[1], 1)))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


# Which layers


def use_float8(model: nn.Module, *, recipe: Float8Recipe) -> frozenset[str]:
    """Makes linear layers in the blocks of `model` multiply in float8. Returns the names of their weights.

    Blocks are the elements of its lists of modules. Layers outside of them, the head above all, stay in 16 bits, and so do routers, routed
    experts, adapters, weights that other modules use, and sizes that are no multiple of 16.

    Raises ValueError for a layer whose forward was replaced before, and for a model without such layers.
    """
    layers = dict(_layers(model))
    users = set(layers.values())
    shared = {id(p) for module in model.modules() if module not in users for p in module._parameters.values()}
    chosen = {
        f"{name}.weight": module
        for name, module in layers.items()
        if id(module.weight) not in shared and not any(size % MULTIPLE for size in module.weight.shape)
    }
    for name, module in chosen.items():
        if type(module) is nn.Linear and has_own_forward(module):
            raise ValueError(
                f"precision.float8={recipe}: the forward of {name.removesuffix('.weight')} was replaced, for example by an adapter, and "
                "computes its own product; use precision=bf16, or pass the model without it"
            )
    if not chosen:
        raise ValueError(
            f"precision.float8={recipe}: the model has no block (an element of a ModuleList, ModuleDict or Sequential) with a linear layer "
            f"whose sizes are multiples of {MULTIPLE}; use precision=bf16"
        )
    for module in chosen.values():
        module.__class__ = Linear
        module.product = Float8Product(recipe=recipe)
    weights = {id(layer.weight) for layer in chosen.values()}
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) in weights)


def check_parts(model: nn.Module, *, names: frozenset[str]) -> None:
    """Raises ValueError if a weight in `names` was cut over ranks into sizes that are no multiples of 16."""
    for name, parameter in model.named_parameters():
        if name in names and any(size % MULTIPLE for size in parameter.shape):
            raise ValueError(
                f"topology.tensor leaves {tuple(parameter.shape)} of {name} on a rank, and float8 products need multiples of {MULTIPLE}: use "
                "a smaller topology.tensor, or precision=bf16"
            )


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Names and linear layers inside of blocks."""
    elements = {child for module in model.modules() if isinstance(module, _LISTS) for child in module.children()}
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if not isinstance(module, nn.Linear) or type(module) not in (nn.Linear, Linear):
            continue
        above = name.split(".")[:-1]
        parent = modules[".".join(above)]
        is_in_block = any(modules[".".join(above[:count])] in elements for count in range(1, len(above) + 1))
        is_routed = _EXPERTS in above or hasattr(parent, _EXPERTS)
        if is_in_block and not is_routed and not set(above) & set(_ADAPTERS):
            yield name, module
