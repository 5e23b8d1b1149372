"""Linear layers without bias, and the fastest way to multiply by them on this processor.

[Note: Matrix products on CPU]
torch sends float32 products to MKL, which on AMD processors stays at AVX2, and float16 products of processors without
float16 arithmetic to a scalar loop. Measured on one core of an EPYC with AVX512, 512 tokens times 512 x 1536,
milliseconds for output / gradient of the input / gradient of the weight:

    float32    F.linear   7.6 /   7.6 /  7.7     oneDNN              3.4 / 3.5 / 4.6
    float16    F.linear  33.9 / 549   / 99       oneDNN in float32   3.5 / 3.7 / 4.8
    bfloat16   F.linear   1.7 /   1.7 /  1.7     (is oneDNN already)

So float32 goes to oneDNN directly, and a 16-bit type that the processor cannot multiply is widened to float32 and the
result rounded once, which is also closer to the exact product.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """y = x W^T with `weight` [out_features, in_features]; x is [..., in_features]."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, weight=self.weight)


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


def linear(x: Tensor, *, weight: Tensor) -> Tensor:
    """x [..., in] times weight [out, in] transposed: [..., out], in the dtype of `x`, or of the autocast around it."""
    if torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    if x.device.type == "cpu" and x.dtype in _BY_ONEDNN and x.numel():
        return _LinearByOneDNN.apply(x, weight)
    return F.linear(x, weight)


class _LinearByOneDNN(torch.autograd.Function):
    """See [Note: Matrix products on CPU]. Saves x and the weight as they are, never their float32 copies."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight)

    @staticmethod
    def backward(ctx, d_out: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        d_x = _product(d_out, weight.t()) if ctx.needs_input_grad[0] else None
        d_weight = _product(d_out.flatten(0, -2).t(), x.flatten(0, -2).t()) if ctx.needs_input_grad[1] else None
        return d_x, d_weight


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.t() in float32, rounded to the dtype of `x`."""
    return torch.ops.mkldnn._linear_pointwise(x.float(), weight.float(), None, "none", [], "").to(x.dtype)
