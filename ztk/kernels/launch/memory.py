"""Memory of an op's results, in little host time.

`torch.empty` looks its arguments up by name and goes through torch's dispatcher, a microsecond; the function that torch.compile's own code
calls for its buffers allocates from the same pools in 0.4. A launcher whose sizes repeat keeps their `Memory` with its launch
(`jit.kept`), and allocates by `maker(x)(*memory)`.
"""

import functools
import itertools
import operator
from collections.abc import Callable

import torch
from torch import Tensor

from ztk.kernels.launch.private import IS_SHORT, empty_strided_cuda

Memory = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides of a contiguous tensor, dtype

# By `is_cuda`: the function that allocates on the current GPU, or None for torch.empty.
_FAST = {True: empty_strided_cuda if IS_SHORT else None, False: None}


def memory_of(*shape: int, dtype: torch.dtype) -> Memory:
    """Arguments for the allocation of a contiguous tensor of this shape (any number of dimensions)."""
    inner = itertools.accumulate((max(1, size) for size in shape[:0:-1]), operator.mul, initial=1)
    return shape, tuple(inner)[::-1] if shape else (), dtype


def maker(like: Tensor) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """`make(*memory)` is an uninitialised tensor of that shape and dtype on the device of `like`, of any shape and dtype, where launchers work
    on the current GPU."""
    return _FAST[like.is_cuda] or functools.partial(_make_usually, device=like.device)


def _make_usually(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, *, device: torch.device
) -> Tensor:
    """Makes a tensor by torch's public call. strides: unused, because the tensor is contiguous."""
    return torch.empty(shape, dtype=dtype, device=device)


def empty_vector(numel: int, *, dtype: torch.dtype, like: Tensor) -> Tensor:
    """Uninitialised [numel] of `dtype` on the device of `like`, where launchers work on the current GPU."""
    make = _FAST[like.is_cuda]
    return torch.empty(numel, dtype=dtype, device=like.device) if make is None else make((numel,), (1,), dtype)


def empty_matrix(rows: int, *, columns: int, dtype: torch.dtype, like: Tensor) -> Tensor:
    """The same of [rows, columns], contiguous, of `dtype`."""
    shape, make = (rows, columns), _FAST[like.is_cuda]
    return torch.empty(shape, dtype=dtype, device=like.device) if make is None else make(shape, (columns, 1), dtype)
