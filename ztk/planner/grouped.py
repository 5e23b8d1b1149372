"""Products of groups of rows in a plan, as experts of transformers compute them: torch's meta device takes bfloat16 alone, GPUs every type."""

import torch
from torch import Tensor

_PRODUCT = torch.ops.aten._grouped_mm.default


def grouped_product(a: Tensor, b: Tensor, *others: object, **named: object) -> Tensor:
    """`torch._grouped_mm` of tensors of any dtype without values, which is the result's; see there for shapes."""
    if a.dtype is torch.bfloat16 or not a.is_meta:
        return _PRODUCT(a, b, *others, **named)
    return _PRODUCT(a.to(torch.bfloat16), b.to(torch.bfloat16), *others, **named).to(a.dtype)


RESULTS = {_PRODUCT: grouped_product}
