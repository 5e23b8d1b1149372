"""Linear layers that multiply in float8, forward and backward. See [Note: Float8 numerics].

Shapes: M positions, N outputs, K inputs. The three products of a layer, each of two float8 matrices with a scale per row, unless a recipe
keeps the last one in 16 bits:

    output              [M, N] = x [M, K] by rows      weight [N, K] by rows
    gradient of x       [M, K] = d_out * scale of the weight's row [M, N] by rows      the weight's codes [N, K]
    gradient of weight  [N, K] = d_out [M, N] by columns      x [M, K] by columns

The forward finds the largest magnitudes of x by rows and by columns in one read, and the backward does so for the output's gradient. Codes of
the gradient by rows and by columns are written in one read, too. Results are bfloat16, as are inputs and weights.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ztk.core.policies.precision import Float8Recipe
from ztk.core.precision.float8 import CODES, scaled_product
from ztk.core.runtime.gradient_places import place_offered
from ztk.core.runtime.input_gradients import taker_of
from ztk.core.runtime.own_forward import has_own_forward
from ztk.kernels import float8_codes, float8_largest
from ztk.kernels.launch.functions import Function
from ztk.kernels.ops.float8 import MULTIPLE
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


class _Float8Linear(Function):
    """x W^T. Saves x and the weight in 16 bits with their largest magnitudes, and only if the backward reads them."""

    INSTEAD = "Use precision=bf16 or fp32"

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, product: Float8Product) -> Tensor:
        ctx.parameter, ctx.product = weight if isinstance(weight, nn.Parameter) else None, product
        is_compiling = torch.compiler.is_compiling()
        ctx.place = None if is_compiling or x.device.type == "cpu" else place_offered(weight)
        ctx.take = None if is_compiling else taker_of(x)
        rows, (has_d_x, has_d_weight) = _rows(x), ctx.needs_input_grad[:2]
        of_rows, of_x = float8_largest(
            rows, columns=has_d_weight and product.recipe is not Float8Recipe.rowwise_with_gw_hp
        )
        of_weight, _ = float8_largest(weight, columns=False)
        ctx.save_for_backward(
            x if has_d_weight else None, weight if has_d_x else None, of_x, of_weight if has_d_x else None
        )
        a, scales_a, *_ = float8_codes(rows, of_rows=of_rows)
        b, scales_b, *_ = float8_codes(weight, of_rows=of_weight)
        out = scaled_product(a, b=b, scales=(scales_a, scales_b), is_fast=True)
        return out.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, d_out: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, of_x, of_weight = ctx.saved_tensors
        rows, (has_d_x, has_d_weight) = _rows(d_out), ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():  # this backward will be differentiated, and codes have no gradient
            return (d_out @ weight if has_d_x else None), (rows.t() @ _rows(x) if has_d_weight else None), None
        # The weight's scale per row is a factor per column of the gradient.
        of_rows, of_columns = float8_largest(rows, of_weight, rows=has_d_x, columns=of_x is not None)
        a, scales_a, columns, of_codes = float8_codes(
            rows, of_weight, of_rows, of_columns, dtype=ctx.product.gradient_codes
        )
        d_x = None
        if has_d_x:
            codes, *_ = float8_codes(weight, of_rows=of_weight, turned=True)
            d_x = scaled_product(a, b=codes, scales=(scales_a, scales_a.new_ones(weight.shape[1], 1)))
            d_x = d_x.view(*d_out.shape[:-1], -1)
            d_x = d_x if ctx.take is None else ctx.take(d_x)
        if not has_d_weight:
            return d_x, None, None
        product = partial(_plain_gradient, rows, x=_rows(x))
        if of_x is not None:
            product = partial(_weight_gradient, columns, scales=of_codes, x=_rows(x), of_x=of_x)
        deferred = ctx.product.deferred
        if deferred is not None and deferred.is_active and ctx.parameter is not None:
            deferred.defer(ctx.parameter, product=product)
            return d_x, None, None
        return d_x, product(out=None if ctx.place is None else ctx.place()), None


def _weight_gradient(d_out: Tensor, *, scales: Tensor, x: Tensor, of_x: Tensor, out: Tensor | None = None) -> Tensor:
    """[N, K], in `out` if given. d_out, scales: codes [N, P] and scales [N, 1] of columns. of_x: largest magnitudes of columns of x [M, K]."""
    *_, codes, of_codes = float8_codes(x, of_columns=of_x)
    return scaled_product(d_out, b=codes, scales=(scales, of_codes), out=out)


def _plain_gradient(d_out: Tensor, *, x: Tensor, out: Tensor | None = None) -> Tensor:
    """d_out [M, N], x [M, K] -> [N, K], in `out` if given."""
    return weight_gradient(d_out, x=x) if out is None else torch.mm(d_out.t(), x, out=out)


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
