"""Operations that are not the model's own, hidden from dispatch modes.

Selective recomputation counts the operations of a block and fails if the repetition runs more of them than the forward; the repetition may
have to gather a bucket that was gathered before the forward. A FLOP counter would book these operations to a module.
"""

import functools
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack


def without_dispatch_modes(function: Callable) -> Callable:
    """`function`, run without any active dispatch mode but those with `sees_everything`, which count memory (`ztk.planner`)."""

    @functools.wraps(function)
    def hidden(*args, **kwargs):
        if not torch._C._len_torch_dispatch_stack():  # the usual case, a microsecond faster
            return function(*args, **kwargs)
        counting = [mode for mode in _get_current_dispatch_mode_stack() if getattr(mode, "sees_everything", False)]
        with ExitStack() as stack:
            stack.enter_context(_disable_current_modes())
            for mode in counting:
                stack.enter_context(mode)
            return function(*args, **kwargs)

    return hidden


def keeps_results() -> bool:
    """Selective recomputation, ztk's or the user's, keeps results of operations now: they must stay as they are."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    kinds = checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode
    return any(isinstance(mode, kinds) for mode in _get_current_dispatch_mode_stack())
