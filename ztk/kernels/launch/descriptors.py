"""Tensors that a kernel gets as descriptors, from which the copy engine of Hopper and later (TMA) loads blocks: no thread computes addresses.

The host makes them (`TensorDescriptor`), and the launch hands them over as parameters. In the kernel (`tl.make_tensor_descriptor`) every
program would write its own to memory that the process has to provide at every launch, and wait for it.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

ALIGNMENT = 16  # bytes, required of a described tensor's address, and of its strides except the last


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The contents of a descriptor without address and dtype. Sizes and strides are in elements; elements of a block outside of a size are
    zero.

    Raises ValueError for a layout that a descriptor cannot represent, see `can_describe`.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    dtype: torch.dtype
    _lists: tuple[list[int], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        if not can_describe(self.shape, strides=self.strides, dtype=self.dtype):
            raise ValueError(f"no descriptor of {self.dtype} has shape {self.shape} and strides {self.strides}")
        # Triton compiles for the text of the block, which is to be a list.
        object.__setattr__(self, "_lists", (list(self.shape), list(self.strides), list(self.block)))

    def describe(self, tensor: Tensor) -> TensorDescriptor:
        """The descriptor of a tensor of this shape, strides and dtype. Raises AssertionError for an address that is not a multiple of 16."""
        return TensorDescriptor(tensor, *self._lists)

    def describe_aligned(self, tensor: Tensor) -> TensorDescriptor:
        """The same, of a tensor whose address is known to be one: in 0.2 us where Triton's constructor, which asserts anew, takes 1.4."""
        return _Descriptor(tensor, *self._lists)


class _Descriptor(TensorDescriptor):
    """Triton's class without the assertions that run for each object."""

    def __post_init__(self):
        pass


def can_describe(shape: tuple[int, ...], *, strides: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether a descriptor can: there are elements, the last dimension is dense, and the other strides are multiples of 16 bytes."""
    *outer, last = strides
    is_aligned = all(stride > 0 and stride * dtype.itemsize % ALIGNMENT == 0 for stride in outer)
    return min(shape) > 0 and last == 1 and is_aligned
