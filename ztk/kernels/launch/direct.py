"""The fast path of an op: calls its launcher without torch's dispatcher when the dispatcher would add nothing.

[Note: Cost of the dispatcher]
torch's dispatcher adds about two microseconds of host time to an op: arguments are converted to torch's values and back to Python's.
It is needed, and used, when something else observes or changes ops: dispatch modes (fake tensors, plans, recomputation's
policies, functionalization), torch.compile and other tracing, transforms of `torch.func`, profilers, tensor subclasses with functions of
their own, arguments that need conversion, tensors on another device than the current GPU. It also warns when gradients are lost, so it is
used while gradients are recorded, which is not the case inside an `autograd.Function`.
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
    """The index of the first tensor among arguments of these types. None if the dispatcher would convert an argument or must handle one."""
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
    """Whether torch handles tensors of this class without any override."""
    if kind is Tensor:
        return True
    return (
        issubclass(kind, Tensor) and kind.__torch_function__ is NO_FUNCTION and kind.__torch_dispatch__ is NO_DISPATCH
    )
