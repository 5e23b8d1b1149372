"""The fast path of an op: its launcher is called without torch's dispatcher where the dispatcher would do nothing but call it.

[Note: What an op costs]
By torch's dispatcher an op costs the host about two microseconds beside its launcher: arguments become torch's values and Python's again.
It has work to do, and is called, where somebody else looks at ops or changes them: dispatch modes (fake tensors, plans, recomputation's
policies, functionalization), torch.compile and other tracing, transforms of `torch.func`, profilers, classes of tensors with functions of
their own, arguments that it would convert, tensors elsewhere than on the current GPU. It also warns where gradients are lost, so it is
called where they are recorded; inside an `autograd.Function` they are not.
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ztk.kernels.launch.private import (
    IS_SHORT,
    NO_DISPATCH,
    NO_FUNCTION,
    PRE_DISPATCH,
    current_gpu,
    dispatch_modes,
    function_modes,
    is_included,
    is_profiled,
    is_tracing,
    transforms,
)

# Of arguments that are no tensors, by the schema's.
_TYPES = {"int": int, "float": float, "bool": bool, "str": str, "ScalarType": torch.dtype}
_is_compiling, _records = torch.compiler.is_compiling, torch.is_grad_enabled


def is_plain() -> bool:
    """Whether this thread runs ops for their values alone, without gradients, tracing, modes or a profiler, and the short path is on."""
    return IS_SHORT and not (
        _is_compiling()  # first: torch.compile cannot trace the others
        or _records()
        or dispatch_modes()
        or function_modes()
        or transforms()
        or is_tracing()
        or is_profiled()
        or forward_ad._current_level >= 0
        or is_included(PRE_DISPATCH)
    )


def is_on_current_gpu(tensor: Tensor) -> bool:
    """Whether a kernel that is launched now can work on `tensor`, of any shape and dtype."""
    return tensor.is_cuda and tensor.get_device() == current_gpu()


def first_tensor(schema: torch.FunctionSchema, *, kinds: tuple[type, ...]) -> int | None:
    """The place of the first tensor among arguments of these types; None: the dispatcher would change them, or has to see one."""
    if len(kinds) != len(schema.arguments):
        return None
    first = None
    for place, (argument, kind) in enumerate(zip(schema.arguments, kinds, strict=True)):
        wanted, is_optional = str(argument.real_type), False
        if wanted.startswith("Optional["):
            wanted, is_optional = wanted[len("Optional[") : -1], True
        if is_optional and kind is type(None):
            continue
        if wanted == "Tensor" and _is_ordinary(kind):
            first = place if first is None else first
        elif kind is not _TYPES.get(wanted):
            return None
    return first


def _is_ordinary(kind: type) -> bool:
    """Tensors of this class take no part in what torch does with them."""
    if kind is Tensor:
        return True
    return (
        issubclass(kind, Tensor) and kind.__torch_function__ is NO_FUNCTION and kind.__torch_dispatch__ is NO_DISPATCH
    )
