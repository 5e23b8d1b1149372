"""Grouped products in a plan, as in the experts of transformers: torch's meta device supports only bfloat16, GPUs every dtype."""

from typing import Any

import torch
from torch import Tensor

_PRODUCT = torch.ops.aten._grouped_mm.default


def grouped_product(*operands: Any, **options: Any) -> Tensor:
    """`torch._grouped_mm` for tensors of any dtype without values. Returns such a tensor; shapes and arguments are as in torch."""
    a, b, *others = operands
    if a.dtype is torch.bfloat16 or not a.is_meta:
        return _PRODUCT(a, b, *others, **options)
    return _PRODUCT(a.to(torch.bfloat16), b.to(torch.bfloat16), *others, **options).to(a.dtype)


RESULTS = {_PRODUCT: grouped_product}
