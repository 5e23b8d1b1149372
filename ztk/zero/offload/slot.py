"""A slot: the address of a stored tensor."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(kw_only=True, slots=True, eq=False)
class StoredSlot:
    """A `ztk.core.runtime.store.Slot` of a store outside of the device. `category` is its line in the memory ledger."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    category: str

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def check_fits(tensor: Tensor, *, slot: StoredSlot, argument: str) -> None:
    """Checks that `tensor` is contiguous and has the slot's dtype and number of elements, in any shape.

    argument: its name in the message. Raises ValueError if not.
    """
    if tensor.numel() != slot.numel or tensor.dtype != slot.dtype or not tensor.is_contiguous():
        raise ValueError(
            f"slot {slot.name!r} holds {slot.numel} contiguous elements of {slot.dtype}, but {argument} has "
            f"{tensor.numel()} of {tensor.dtype}{'' if tensor.is_contiguous() else ', not contiguous'}"
        )


def flat_bytes(tensor: Tensor) -> Tensor:
    """The memory of `tensor` as uint8 [nbytes]."""
    return tensor.detach().reshape(-1).view(torch.uint8)
