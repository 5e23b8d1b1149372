"""Linear layers with the fastest matrix product of this processor.

[Note: Matrix products on CPU]
torch sends float32 products to MKL, which on AMD processors stays at AVX2, and float16 products of processors without
float16 arithmetic to a scalar loop. Measured on one core of an EPYC with AVX512, 512 tokens times 512 x 1536,
milliseconds for output / gradient of the input / gradient of the weight:

    float32    F.linear   7.6 /   7.6 /  7.7     oneDNN              3.4 / 3.5 / 4.6
    float16    F.linear  33.9 / 549   / 99       oneDNN in float32   3.5 / 3.7 / 4.8
    bfloat16   F.linear   1.7 /   1.7 /  1.7     (is oneDNN already)

On an EPYC of the generation before, the difference in float32 is smaller: 8.3 / 9.2 / 9.8 and 7.9 / 7.5 / 7.9 for 512 x 1408.

So float32 goes to oneDNN directly, and a 16-bit type that the processor cannot multiply is widened to float32 and the
result rounded once, which is also closer to the exact product. Results have the dtype of their inputs.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import has_torch_function
from torch.utils.flop_counter import register_flop_formula

from ztk.core.runtime.gradient_places import place_offered
from ztk.core.runtime.input_gradients import Taker, taker_of
from ztk.kernels.launch.functions import Function, is_transformed


class Linear(nn.Linear):
    """y = x W^T with `weight` [out_features, in_features]; x is [..., in_features]. Only layers converted from torch's can have a bias.

    product: computes the output, called like `linear`.
    """

    product: Callable[..., Tensor]

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, weight=self.weight, bias=self.bias)


def speed_up_linear_layers(model: nn.Module) -> None:
    """Makes torch's own linear layers in `model` multiply by `linear`, which differs from `F.linear` by rounding. Layers of derived
    classes are not changed, because their forward may differ.
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear


def _without_arithmetic() -> frozenset[torch.dtype]:
    """The 16-bit types that this processor cannot multiply."""
    if not HAS_ONEDNN:
        return frozenset()
    has = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    return frozenset(dtype for dtype, supported in has.items() if not supported)


HAS_ONEDNN = torch.backends.mkldnn.is_available()  # the wheels for x86 and 64-bit ARM have it
WIDENED = _without_arithmetic()
_BY_ONEDNN = WIDENED | {torch.float32} if HAS_ONEDNN else frozenset()


def linear(x: Tensor, *, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] times weight [out, in] transposed, plus bias [out]: [..., out], in the dtype of `x`, or of the surrounding autocast."""
    if is_autocast(x.device):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if _is_for_onednn(x, weight):
        if not torch.is_grad_enabled():  # `apply` costs more than a small product
            return _product(x, weight, bias)
        return _LinearByOneDNN.apply(x, weight, bias, _taker(x))
    if _has_place(x, weight):
        return _LinearIntoPlace.apply(x, weight, bias, _taker(x))
    return F.linear(x, weight, bias)


Linear.product = staticmethod(linear)


def is_autocast(device: torch.device) -> bool:
    """Whether autocast is active for operations on `device`."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def weight_gradient(d_out: Tensor, *, x: Tensor) -> Tensor:
    """d_out^T x, summed over all positions: d_out [..., out], x [..., in] -> [out, in], not always contiguous."""
    d_out, x = _rows(d_out).t(), _rows(x).t()  # [out, positions], [in, positions]
    if not _is_for_onednn(d_out, x):
        return d_out @ x.t()
    # oneDNN takes its first operand by rows only, so one of the two is copied. Copying the smaller one takes 8.5 -> 7.9 ms for 512 tokens,
    # 512 -> 1408, including the copy of a result that must be stored by rows.
    return _product(x, d_out).t() if d_out.shape[0] > x.shape[0] else _product(d_out, x)


def _is_for_onednn(a: Tensor, b: Tensor) -> bool:
    """Whether oneDNN computes this product. torch's own path is kept for invalid products, to raise its error, and for intercepted ones."""
    return (
        a.dtype in _BY_ONEDNN
        and a.dtype is b.dtype
        and a.device.type == b.device.type == "cpu"
        and a.numel() > 0
        and b.numel() > 0
        and a.shape[-1] == b.shape[-1]
        and not is_transformed()
        and (torch.compiler.is_compiling() or not _is_intercepted(a, b))
    )


def _has_place(x: Tensor, weight: Tensor) -> bool:
    """Whether the backward may write the weight's gradient into its bucket. Not on the CPU, where oneDNN allocates its own results."""
    return (
        _computes_elsewhere(x)
        and weight.requires_grad
        and torch.is_grad_enabled()
        and place_offered(weight) is not None
        and x.dtype is weight.dtype
        and x.numel() > 0
        and not torch.compiler.is_compiling()
        and not is_transformed()
        and not _is_intercepted(x, weight)
    )


def _computes_elsewhere(x: Tensor) -> bool:
    """Whether `x` is not on the CPU."""
    return x.device.type != "cpu"


def _is_intercepted(*tensors: Tensor) -> bool:
    """Whether a layout, a tensor subclass or a mode over torch's functions replaces the product."""
    return any(tensor.layout is not torch.strided for tensor in tensors) or has_torch_function(tensors)


class _LinearByOneDNN(Function):
    """See [Note: Matrix products on CPU]. Saves x and the weight only if the backward reads them, and never their float32 copies."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, take: Taker | None = None) -> Tensor:
        # A tensor that is not read must not be kept, and ZeRO must not gather it in the backward.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
        ctx.take = take
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx, d_out: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        again = torch.is_grad_enabled()  # this backward will be differentiated, and oneDNN's product has no gradient
        d_x = d_weight = d_bias = None
        if ctx.needs_input_grad[0]:
            d_x = d_out @ weight if again else _handed_over(ctx.take, _product(d_out, weight.t()))
        if ctx.needs_input_grad[1]:
            d_weight = _rows(d_out).t() @ _rows(x) if again else weight_gradient(d_out, x=x)
        if ctx.needs_input_grad[2]:
            d_bias = _rows(d_out).sum(0)
        return d_x, d_weight, d_bias, None


class _LinearIntoPlace(Function):
    """`F.linear`; writes the weight's gradient into its place in a bucket if there is one (`ztk.core.runtime.gradient_places`)."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, take: Taker | None = None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
        ctx.place, ctx.take = place_offered(weight), take
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, d_out: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        rows = _rows(d_out)
        again = torch.is_grad_enabled()  # this backward will be differentiated
        d_x = d_weight = d_bias = None
        if ctx.needs_input_grad[0]:
            d_x = (rows @ weight).view(*d_out.shape[:-1], weight.shape[1])
            d_x = d_x if again else _handed_over(ctx.take, d_x)
        if ctx.needs_input_grad[1]:
            place = None if again else ctx.place()
            d_weight = rows.t() @ _rows(x) if place is None else torch.mm(rows.t(), _rows(x), out=place)
        if ctx.needs_input_grad[2]:
            d_bias = rows.sum(0)
        return d_x, d_weight, d_bias, None


def _taker(x: Tensor) -> Taker | None:
    """The taker of the gradient of `x` (any shape). None under torch.compile, where the sum over ranks waits for autograd."""
    return None if torch.compiler.is_compiling() else taker_of(x)


def _handed_over(take: Taker | None, d_x: Tensor) -> Tensor | None:
    """The gradient of the input, [..., in], or the tensor that its taker returns instead."""
    return d_x if take is None else take(d_x)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.t() + bias in float32, rounded to the dtype of `x`."""
    return _opaque(x, weight, bias) if torch.compiler.is_compiling() else _by_onednn(x, weight, bias)


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    bias = None if bias is None else bias.float()
    return torch.ops.mkldnn._linear_pointwise(x.float(), weight.float(), bias, "none", [], "").to(x.dtype)


# TorchInductor's own lowering of this product takes constant weights only, so compiled code calls an op that it cannot look into.
_opaque = torch.library.custom_op("ztk::linear", _by_onednn, mutates_args=(), device_types="cpu")


@_opaque.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


if HAS_ONEDNN:

    @register_flop_formula([torch.ops.mkldnn._linear_pointwise, torch.ops.ztk.linear])
    def _count_operations(x: torch.Size, weight: torch.Size, *args, **kwargs) -> int:
        """FLOPs for torch's FLOP counter and profilers that use it, which only support torch's own products."""
        return 2 * x.numel() * weight[0]
