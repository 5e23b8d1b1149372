"""Products of groups of rows in a plan, as experts of transformers compute them.

torch's meta device takes them in bfloat16 alone, and GPUs in every type; torch's counter of operations does not know them.
"""

import torch
from torch import Tensor

_PRODUCT = torch.ops.aten._grouped_mm.default


def grouped_product(a: Tensor, b: Tensor, *others: object, **named: object) -> Tensor:
    """`torch._grouped_mm` of tensors of any type without values; see there for shapes."""
    if a.dtype is torch.bfloat16 or not a.is_meta:
        return _PRODUCT(a, b, *others, **named)
    return _PRODUCT(a.to(torch.bfloat16), b.to(torch.bfloat16), *others, **named).to(a.dtype)


def _flops(a: Tensor, b: Tensor, *_: object, **__: object) -> int:
    """Every row of one side meets one matrix of the other: the groups together are as large as one product without groups."""
    matrices = len(a) if a.dim() == 3 and b.dim() == 2 else 1
    return 2 * a.numel() * b.shape[-1] // matrices


RESULTS = {_PRODUCT: grouped_product}
FLOPS = {_PRODUCT: _flops}
