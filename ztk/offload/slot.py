"""What a store hands out: a slot is the address of a sleeping tensor, a pending its way back."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SlotSpec:
    """Name, shape and dtype of a tensor that sleeps in a store; `category` is its line in the memory ledger."""

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


class Pending(Protocol):
    """A transfer under way."""

    def wait(self) -> Tensor:
        """Block until it is done; the fetched tensor, `out` or `value`. Raises the transfer's error, each time."""


def check_fits(tensor: Tensor, *, spec: SlotSpec, argument: str) -> None:
    """Raise ValueError unless `tensor` is contiguous with the slot's number of elements and dtype."""
    if tensor.numel() != spec.numel or tensor.dtype != spec.dtype or not tensor.is_contiguous():
        raise ValueError(
            f"slot {spec.name!r} holds {spec.numel} contiguous elements of {spec.dtype}, but {argument} has "
            f"{tensor.numel()} of {tensor.dtype}{'' if tensor.is_contiguous() else ', not contiguous'}"
        )


def flat_bytes(tensor: Tensor) -> Tensor:
    """The same memory as uint8 [nbytes]."""
    return tensor.detach().reshape(-1).view(torch.uint8)
