"""Comparison of tensors by their bits, without copies."""

import torch
from torch import Tensor

_CHUNK = 1 << 20  # elements that are summed at once
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(first: Tensor, *, second: Tensor) -> bool:
    """Whether two tensors of one size, flat, have the same dtype and the same bits, NaN included."""
    return first.dtype == second.dtype and torch.equal(
        first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8)
    )


@torch.no_grad()
def digest_of(values: Tensor) -> Tensor:
    """int64 []: a sum of the bits of `values`, of any shape and dtype, each weighted by its place. On the device of `values`."""
    flat = Tensor.detach(values).contiguous().reshape(-1)  # the `detach` of an engine's parameter records its caller
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    words = flat.view(_WORDS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for number, chunk in enumerate(words.split(_CHUNK)):
        places = torch.arange(chunk.numel(), device=values.device) * 2 + 1
        total += (chunk * places).sum() * (2 * number + 1)
    return total
