"""Hides ztk's own operations from dispatch modes.

Selective recomputation counts the operations of a block and fails if the repetition runs more of them than the forward. The repetition may
have to gather a bucket that was already gathered in the forward. A FLOP counter would attribute these operations to a module.
"""

import functools
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack


def without_dispatch_modes(function: Callable) -> Callable:
    """Wraps `function` to run without active dispatch modes, except modes with `sees_everything`, which count memory (`ztk.planner`)."""

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
    """Whether a selective recomputation, ztk's or the user's, is keeping results of operations. These must then not change in place."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    kinds = checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode
    return any(isinstance(mode, kinds) for mode in _get_current_dispatch_mode_stack())
