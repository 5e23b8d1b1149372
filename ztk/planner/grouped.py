"""Products that torch's meta device does not have as GPUs do: grouped ones, as in the experts of transformers, in other dtypes than bfloat16,
and float8 ones into an existing tensor."""

from typing import Any

import torch
from torch import Tensor

_PRODUCT = torch.ops.aten._grouped_mm.default
_INTO = torch.ops.aten._scaled_mm.out


def grouped_product(*operands: Any, **options: Any) -> Tensor:
    """`torch._grouped_mm` for tensors of any dtype without values. Returns such a tensor; shapes and arguments are as in torch."""
    a, b, *others = operands
    if a.dtype is torch.bfloat16 or not a.is_meta:
        return _PRODUCT(a, b, *others, **options)
    return _PRODUCT(a.to(torch.bfloat16), b.to(torch.bfloat16), *others, **options).to(a.dtype)


def float8_product(*operands: Any, out: Tensor, **options: Any) -> Tensor:
    """`torch._scaled_mm` into `out` [M, N]; shapes and arguments are as in torch."""
    return out if out.is_meta else _INTO(*operands, out=out, **options)


RESULTS = {_PRODUCT: grouped_product, _INTO: float8_product}
