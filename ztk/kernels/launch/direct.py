"""An op's launcher, called where torch's dispatcher would do nothing but call it.

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

# Of arguments that are no tensors, by the schema's.
_TYPES = {"int": int, "float": float, "bool": bool, "str": str, "ScalarType": torch.dtype}
_modes, _functions = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_transforms, _is_tracing = torch._C._are_functorch_transforms_active, torch._C._is_tracing
_is_compiling = torch.compiler.is_compiling
_is_profiled, _records = torch._C._autograd._profiler_enabled, torch.is_grad_enabled
_is_included, _PRE_DISPATCH = torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.PreDispatch


def is_plain() -> bool:
    """Whether this thread runs ops for their values alone: no gradients, no tracing, nobody who looks on."""
    return not (
        _is_compiling()  # the first: of the others torch.compile knows nothing
        or _records()
        or _modes()
        or _functions()
        or _transforms()
        or _is_tracing()
        or _is_profiled()
        or forward_ad._current_level >= 0
        or _is_included(_PRE_DISPATCH)
    )


def is_on_current_gpu(tensor: Tensor) -> bool:
    """Whether a kernel that is launched now can work on `tensor`, of any shape and dtype."""
    return tensor.is_cuda and tensor.get_device() == torch._C._cuda_getDevice()


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
        issubclass(kind, Tensor)
        and kind.__torch_function__ is torch._C._disabled_torch_function_impl
        and kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    )
