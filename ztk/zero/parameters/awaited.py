"""Parameters whose updated value is still being gathered: any access through torch waits for it.

After a step of stages 1 and 2 the ranks gather the updated parameters while the next forward begins (`ZeroPolicy.overlap_gather`). Until a
bucket's gather has completed, the class of its parameters intercepts every torch function that receives one. It waits, restores the
parameters' usual class, and runs the function. Attributes of modules wait too, for functions that bypass torch (C++ extensions, scripted
functions). One case is missed: a script keeps a parameter from before the step and passes it to such a function between steps. A bucket is
gathered without overlap while a script has a view of one of its parameters, such as `p.data`.
A parameter has the dtype of its bucket.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ztk.zero.parameters.released import change_class

_WAIT = "_ztk_wait"  # an attribute of an awaited parameter
# Properties that do not depend on the values.
_WITHOUT_VALUES = frozenset({
    "grad", "requires_grad", "shape", "dtype", "device", "layout", "ndim", "is_leaf", "is_cuda", "is_meta", "is_sparse",
    "grad_fn", "names", "itemsize", "nbytes", "_version",
})  # fmt: skip


class _Awaited:
    """Mixed into the class of a parameter while its value is pending."""

    _usual_class: type

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        of_property = getattr(function, "__self__", None) if function.__name__ in ("__get__", "__set__") else None
        if getattr(of_property, "__name__", "") not in _WITHOUT_VALUES:
            for value in (*args, *(kwargs or {}).values()):
                _arrive(value)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict) -> Any:
        _arrive(self)
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _arrive(self)
        return self.__reduce_ex__(protocol)


def await_value(parameter: nn.Parameter, *, wait: Callable[[], None]) -> None:
    """Makes every use of the value of `parameter` (any shape) call `wait()` first, which must call `arrived`."""
    parameter.__dict__[_WAIT] = wait
    change_class(parameter, make=_awaited)


def wait_for(parameter: nn.Parameter) -> None:
    """Waits for the value of `parameter` (any shape)."""
    _arrive(parameter)


def arrived(parameter: nn.Parameter) -> None:
    """Restores the usual class of `parameter` (any shape), because its value has arrived."""
    if isinstance(parameter, _Awaited):
        parameter.__class__ = parameter._usual_class
        del parameter.__dict__[_WAIT]


def _arrive(value: Any) -> None:
    """Waits for `value`, or for the parameters in it."""
    if isinstance(value, _Awaited):
        wait = value.__dict__.get(_WAIT)
        if wait is not None:  # None if another thread has waited meanwhile
            wait()
    elif isinstance(value, list | tuple):
        for item in value:
            _arrive(item)
    elif isinstance(value, dict):
        for item in value.values():
            _arrive(item)


@functools.cache
def _awaited(cls: type) -> type:
    return type(f"Awaited{cls.__name__}", (_Awaited, cls), {"__module__": __name__, "_usual_class": cls})
