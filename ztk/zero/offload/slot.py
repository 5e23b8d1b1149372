"""A slot: the address of a stored tensor."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SlotSpec:
    """Name, shape and dtype of a stored tensor. `category` is its line in the memory ledger."""

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


def check_fits(tensor: Tensor, *, spec: SlotSpec, argument: str) -> None:
    """Checks that `tensor` is contiguous and has the slot's dtype and number of elements, in any shape.

    argument: its name in the message. Raises ValueError if not.
    """
    if tensor.numel() != spec.numel or tensor.dtype != spec.dtype or not tensor.is_contiguous():
        raise ValueError(
            f"slot {spec.name!r} holds {spec.numel} contiguous elements of {spec.dtype}, but {argument} has "
            f"{tensor.numel()} of {tensor.dtype}{'' if tensor.is_contiguous() else ', not contiguous'}"
        )


def flat_bytes(tensor: Tensor) -> Tensor:
    """The memory of `tensor` as uint8 [nbytes]."""
    return tensor.detach().reshape(-1).view(torch.uint8)
