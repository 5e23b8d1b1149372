"""Hides ztk's own operations from dispatch modes.

Selective recomputation counts the operations of a block and fails if the repetition runs more of them than the forward. The repetition may
have to gather a bucket that was already gathered in the forward. A FLOP counter would attribute these operations to a module.
"""

import functools
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from ztk.kernels.launch.private import PRE_DISPATCH, is_included


def without_dispatch_modes(function: Callable) -> Callable:
    """Wraps `function` to run without active dispatch modes, except modes with `sees_everything`, which count memory (`ztk.planner`)."""

    @functools.wraps(function)
    def hidden(*args, **kwargs):
        if not torch._C._len_torch_dispatch_stack():  # the usual case, a microsecond faster
            return function(*args, **kwargs)
        refuse_tracing(function.__qualname__)
        counting = [mode for mode in _get_current_dispatch_mode_stack() if getattr(mode, "sees_everything", False)]
        with ExitStack() as stack:
            stack.enter_context(_disable_current_modes())
            for mode in counting:
                stack.enter_context(mode)
            return function(*args, **kwargs)

    return hidden


def is_traced() -> bool:
    """Whether make_fx, `torch.func.linearize` (which uses it) or torch.export records the operations of this thread."""
    if torch.compiler.is_compiling():  # first: torch.compile cannot trace the others
        return torch.compiler.is_exporting()
    is_observed = torch._C._len_torch_dispatch_stack() or is_included(PRE_DISPATCH)
    return bool(is_observed) and get_proxy_mode() is not None


def refuse_tracing(name: str) -> None:
    """Raises RuntimeError while operations are recorded: a record would lack the communication `name`, without an error."""
    if is_traced():
        raise RuntimeError(
            f"make_fx, torch.func.linearize and torch.export cannot record {name}, which communicates with other ranks. Build the model "
            "without an engine, load ztk.checkpoint.full_state_dict(engine) into it, and record that. torch.func.jvp works where "
            "linearize does not"
        )


def keeps_results() -> bool:
    """Whether a selective recomputation, ztk's or the user's, is keeping results of operations. These must then not change in place."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    kinds = checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode
    return any(isinstance(mode, kinds) for mode in _get_current_dispatch_mode_stack())
