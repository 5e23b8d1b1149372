"""Operations of the engine's own, hidden from what watches the model's.

A selective recomputation counts every operation of a block and wants no more of them in the repetition than in the forward; but there a
bucket may be gathered that was there before. A counter of FLOPs would book them to a module.
"""

import functools
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _disable_current_modes


def without_dispatch_modes(function: Callable) -> Callable:
    """No dispatch mode sees what `function` does."""

    @functools.wraps(function)
    def hidden(*args, **kwargs):
        if not torch._C._len_torch_dispatch_stack():  # mostly; a microsecond less
            return function(*args, **kwargs)
        with _disable_current_modes():
            return function(*args, **kwargs)

    return hidden
