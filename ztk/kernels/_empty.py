"""Memory of an op's short results, in little host time.

`torch.empty` looks its arguments up by name and goes through torch's dispatcher, a microsecond; the function that torch.compile's own code
calls for its buffers allocates from the same pools in 0.4.
"""

import torch
from torch import Tensor

# By `is_cuda`; on the current GPU. Not a public function: a torch without it takes the usual one.
_FAST = {True: getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None), False: None}


def empty(shape: tuple[int, int, int], *, dtype: torch.dtype, like: Tensor) -> Tensor:
    """Uninitialised [rows, columns, depth] of `dtype` on the device of `like`, where launchers work on the current GPU."""
    (_, columns, depth), make = shape, _FAST[like.is_cuda]
    if make is None:
        return torch.empty(shape, dtype=dtype, device=like.device)
    return make(shape, (columns * depth, depth, 1), dtype)


def empty_vector(numel: int, *, dtype: torch.dtype, like: Tensor) -> Tensor:
    """Uninitialised [numel] of `dtype` on the device of `like`, where launchers work on the current GPU."""
    make = _FAST[like.is_cuda]
    return torch.empty(numel, dtype=dtype, device=like.device) if make is None else make((numel,), (1,), dtype)


def empty_matrix(rows: int, *, columns: int, dtype: torch.dtype, like: Tensor) -> Tensor:
    """The same of [rows, columns], contiguous, of `dtype`."""
    shape, make = (rows, columns), _FAST[like.is_cuda]
    return torch.empty(shape, dtype=dtype, device=like.device) if make is None else make(shape, (columns, 1), dtype)
