"""Hooks on saved tensors inside of others'. PyTorch calls only the innermost pair, which passes on what is not its own."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Hooks = tuple[Callable[[Tensor], object], Callable[[object], Tensor]]  # pack, unpack


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedOutside:
    """A saved tensor that the outer hooks packed. unpack: theirs; None: there were none, and `packed` is the tensor."""

    packed: object
    unpack: Callable[[object], Tensor] | None

    def restore(self) -> Tensor:
        """The saved tensor, in its own shape and dtype."""
        return self.packed if self.unpack is None else self.unpack(self.packed)


def active_hooks() -> Hooks | None:
    """The hooks on saved tensors that are called now; None: there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)
