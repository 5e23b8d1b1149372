"""Operations that are not the model's own, hidden from dispatch modes.

Selective recomputation counts the operations of a block and fails if the repetition runs more of them than the forward; the repetition may
have to gather a bucket that was gathered before the forward. A FLOP counter would book these operations to a module.
"""

import functools
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _disable_current_modes


def without_dispatch_modes(function: Callable) -> Callable:
    """`function`, run without any active dispatch mode."""

    @functools.wraps(function)
    def hidden(*args, **kwargs):
        if not torch._C._len_torch_dispatch_stack():  # the usual case, a microsecond faster
            return function(*args, **kwargs)
        with _disable_current_modes():
            return function(*args, **kwargs)

    return hidden
