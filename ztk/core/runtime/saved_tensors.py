"""Nested hooks on saved tensors. PyTorch calls only the innermost pair, so ztk's hooks pass other tensors to the outer pair."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Hooks = tuple[Callable[[Tensor], object], Callable[[object], Tensor]]  # pack, unpack


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedOutside:
    """A saved tensor that the outer hooks packed. unpack: the outer unpack hook, or None if there was none and `packed` is the tensor."""

    packed: object
    unpack: Callable[[object], Tensor] | None

    def restore(self) -> Tensor:
        """The saved tensor, in its original shape and dtype."""
        return self.packed if self.unpack is None else self.unpack(self.packed)


def active_hooks() -> Hooks | None:
    """The active hooks on saved tensors, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)
