"""Products of groups of rows in a plan, as experts of transformers compute them: torch's meta device takes bfloat16 alone, GPUs every type."""

from typing import Any

import torch
from torch import Tensor

_PRODUCT = torch.ops.aten._grouped_mm.default


def grouped_product(*operands: Any, **options: Any) -> Tensor:
    """`torch._grouped_mm` of tensors of any dtype without values, which is the result's; see there for shapes and arguments."""
    a, b, *others = operands
    if a.dtype is torch.bfloat16 or not a.is_meta:
        return _PRODUCT(a, b, *others, **options)
    return _PRODUCT(a.to(torch.bfloat16), b.to(torch.bfloat16), *others, **options).to(a.dtype)


RESULTS = {_PRODUCT: grouped_product}
